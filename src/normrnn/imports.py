"""Run a function when a module has been imported, without importing it."""

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


def after_import(name: str, call: Callable[[Any], None]) -> None:
    """Call ``call(module)`` as soon as the module ``name`` has been imported; now if it has."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watcher(name, call))


class _Watcher(MetaPathFinder):
    """Finds the module as Python would, and adds the call to its execution."""

    def __init__(self, name: str, call: Callable[[Any], None]):
        self.name, self.call, self.is_searching = name, call, False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        if fullname != self.name or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec: Any = importlib.util.find_spec(fullname)
        finally:
            self.is_searching = False
        execute = getattr(getattr(spec, "loader", None), "exec_module", None)
        if execute is None:
            return None

        def exec_module(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.call(module)

        spec.loader.exec_module = exec_module
        return spec
