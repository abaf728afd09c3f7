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
from pathlib import Path
from types import ModuleType
from typing import Any

from normrnn import norms
from normrnn.config.base import Config
from normrnn.config.registry import recipes, register
from normrnn.errors import UsageError, UserError
from normrnn.files import expanded

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
    """Import the object that `name` names, from the directory `path` if one is given.

    What the module itself imports is looked for there last, so that a file there cannot take the
    place of another module.
    """
    if not is_import_path(name):
        raise UsageError(f"{name!r} is not an import path: expected module:name")
    module_name, _, attributes = name.partition(":")
    directory = None if path is None else expanded(path).resolve()
    if directory is not None and not directory.is_dir():
        raise UsageError(f"{path} is not a directory")
    if directory is not None and str(directory) not in sys.path:
        sys.path.append(str(directory))
    try:
        thing = functools.reduce(getattr, attributes.split("."), import_module(module_name))
    except UserError:
        raise
    except (ImportError, AttributeError) as error:
        hint = "" if path else "; --path DIR says where the module is"
        raise UsageError(f"cannot import {name}: {error}{hint}") from error
    except Exception as error:
        raise UserError(f"importing {name} failed: {type(error).__name__}: {error}") from error
    root = _root(sys.modules[module_name.partition(".")[0]])
    if directory is not None and not root.samefile(directory):
        raise UsageError(f"module {module_name!r} is already imported from {root}, not {path}")
    _imported[name] = str(root)
    return thing


def _root(module: ModuleType) -> Path:
    """Return the directory in which a top-level module or package is."""
    is_package = hasattr(module, "__path__")
    file = next(iter(module.__path__)) if is_package else getattr(module, "__file__", None)
    return Path(file or sys.prefix).absolute().parent


def import_path(thing: Any) -> str:
    """Return the import path of a function or class; UsageError if it cannot be imported."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    path = f"{module}:{name}"
    if module == "__main__" or not is_import_path(path):
        where = "is defined in the script that runs" if module == "__main__" else "is local"
        reason = f"it {where}: put it at the top level of a module"
    else:
        try:
            if find(path) is thing:
                return path
            reason = "that is another object"
        except UserError as error:
            reason = str(error)
    raise UsageError(f"other processes cannot import {path}: {reason}")


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
