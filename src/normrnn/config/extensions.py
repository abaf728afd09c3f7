"""Recipes, tasks, normalisations and training functions of a user's own, named by import path.

``my_module:recipe`` is imported only if the user gives that name on the command line or as an
argument: from the directory that the user gives, or from where Python finds installed packages.
Nothing here is called with a name that was read from a file. Child processes get the names and
locations from their parent (`handed_over`, `receive`).
"""

import functools
import inspect
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from normrnn import norms
from normrnn.config.base import Config
from normrnn.config.registry import recipes, register
from normrnn.errors import UsageError, UserError

_IMPORT_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
_imported: dict[str, str] = {}
"""Import path -> directory that its module was found in."""


def is_import_path(name: Any) -> bool:
    """Whether a name has the form module:attribute.

    >>> is_import_path("my_module:recipe"), is_import_path("ptb-small"), is_import_path("a://b")
    (True, False, False)
    """
    return isinstance(name, str) and _IMPORT_PATH.fullmatch(name) is not None


def find(name: str, path: str | Path | None = None) -> Any:
    """Import the object that `name` names, from the directory `path` if one is given."""
    if not is_import_path(name):
        raise UsageError(f"{name!r} is not an import path: expected module:name")
    module_name, _, attributes = name.partition(":")
    try:
        module = _import(module_name, path)
        thing = functools.reduce(getattr, attributes.split("."), module)
    except UserError:
        raise
    except (ImportError, AttributeError) as error:
        hint = "" if path else "; --path DIR says where the module is"
        raise UsageError(f"cannot import {name}: {error}{hint}") from error
    except Exception as error:
        raise UserError(f"importing {name} failed: {type(error).__name__}: {error}") from error
    _imported[name] = str(_root(module))
    return thing


def _import(name: str, path: str | Path | None) -> ModuleType:
    """Import a module. One from `path` is found there first, and what it imports itself last, so
    that a file there cannot take the place of another module."""
    top = name.partition(".")[0]
    if path is not None and top not in sys.modules:
        directory = Path(path).expanduser().resolve()
        if not directory.is_dir():
            raise UsageError(f"{path} is not a directory")
        spec = PathFinder.find_spec(top, [str(directory)])
        if spec is None:
            raise ImportError(f"no module {top!r} in {directory}")
        if str(directory) not in sys.path:
            sys.path.append(str(directory))
        if spec.loader is not None:
            module = sys.modules[top] = module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[top]
                raise
    module = import_module(name)
    if path is not None and not _root(module).samefile(Path(path).expanduser()):
        raise UsageError(f"module {name!r} is already imported from {_root(module)}, not {path}")
    return module


def _root(module: ModuleType) -> Path:
    """Return the directory from which a module is imported by its full name."""
    file = getattr(module, "__file__", None)
    folder = Path(file).absolute().parent if file else Path(next(iter(module.__path__))).absolute()
    depth = module.__name__.count(".") + hasattr(module, "__path__")
    return folder.parents[depth - 1] if depth else folder


def import_path(thing: Any) -> str:
    """Return the import path of a function or class; UsageError if it cannot be imported."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    path = f"{module}:{name}"
    if module == "__main__" or not is_import_path(path):
        where = "is defined in the script that runs" if module == "__main__" else "is local"
        raise UsageError(
            f"other processes cannot import {name or thing!r}, which {where}: put it at the top"
            " level of a module"
        )
    try:
        same = find(path) is thing
    except UserError as error:
        raise UsageError(f"other processes cannot import {path}: {error}") from error
    if not same:
        raise UsageError(f"other processes cannot import {path}: that is another object")
    return path


def is_recipe(thing: Any) -> bool:
    """Whether an object is a config class, or a function that needs no arguments."""
    if isinstance(thing, type):
        return issubclass(thing, Config)
    return callable(thing) and all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        for p in inspect.signature(thing).parameters.values()
    )


def use(what: Any, path: str | Path | None = None) -> str:
    """Register a recipe or a normalisation, given by its import path or as an object; return the
    name it is known by: a recipe's is its import path."""
    if isinstance(what, str):
        return _register(find(what, path), what)
    return _register(what, import_path(what))


def _register(thing: Any, name: str) -> str:
    if isinstance(thing, norms.Norm):
        if thing.name not in norms.names():
            norms.register(thing)
        elif norms.get(thing.name) != thing:
            raise UsageError(f"there is another normalisation {thing.name!r} already")
        return thing.name
    if name in recipes():
        return name
    if not is_recipe(thing):
        raise UsageError(
            f"{name} is {type(thing).__name__}; expected a function without arguments that returns"
            " a config, a config class, or a normrnn.norms.Norm"
        )
    make = thing
    if isinstance(thing, type):
        make = functools.partial(thing, recipe=name)
        make.__doc__ = thing.__doc__
    if not isinstance(config := make(), Config):
        raise UsageError(f"{name} returned {type(config).__name__}, not a config")
    register(make, name)
    return name


def use_norms(names: Any, path: str | Path | None = None) -> Any:
    """Replace import paths among normalisations by the names that they are known by."""
    if isinstance(names, str):
        return ",".join(use_norms(names.split(","), path))
    return [use(one, path) if is_import_path(one) else one for one in names]


def handed_over() -> dict[str, str]:
    """Return what a child process has to import: import path -> directory."""
    return dict(_imported)


def receive(imports: Mapping[str, str]) -> None:
    """Import and register in a child process what its parent handed over."""
    for name, path in imports.items():
        thing = find(name, path)
        if isinstance(thing, norms.Norm) or is_recipe(thing):
            _register(thing, name)
