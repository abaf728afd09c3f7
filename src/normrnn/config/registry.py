"""The recipes, tasks and normalisations that are known, those of a user's own included.

A recipe is a function that returns a complete config. The config's class is the torch-free half of
its task; its `task` names the class with the other half, imported when a network is built.
`normrnn.recipes` registers the recipes of this package, and is imported when it is needed.

What is named ``my_module:recipe`` is imported only if the user gives that name on the command line
or as an argument: from the directory that the user gives, or from where Python finds installed
packages. Nothing here is called with a name that was read from a file. Child processes get the
names and locations from their parent (`child_imports`, `import_from_parent`).
"""

import contextlib
import difflib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from normrnn import norms
from normrnn.config.base import Config, Measure
from normrnn.config.jsonio import flat, from_dict, to_dict
from normrnn.errors import UsageError, UserError
from normrnn.files import expanded

KIND = "function"  # the `kind` in config.json of a run of a training function
Recipe = TypeVar("Recipe", bound=Callable[[], Config])
_RECIPES: dict[str, Callable[[], Config]] = {}
_IMPORT_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
child_imports: dict[str, str] = {}  # import path -> directory that its module was found in


def register(make: Recipe, name: str | None = None) -> Recipe:
    """Register a recipe under a name, by default the function's with dashes, and return it.

    The first line of its docstring is its summary. ValueError for a name that is taken.
    """
    name = name or make.__name__.replace("_", "-")
    if name in _RECIPES:
        raise ValueError(f"there is a recipe {name!r} already")
    _RECIPES[name] = make
    return make


def recipes() -> dict[str, Callable[[], Config]]:
    """Return name -> function, those of this package first."""
    import_module("normrnn.recipes")
    return _RECIPES


def recipe(name: str) -> Config:
    """Return the config of the named recipe; UsageError that lists the choices if unknown."""
    available = recipes()
    if name not in available:
        hint = did_you_mean(name, available)
        raise UsageError(f"no recipe {name!r}{hint or '.'} There are: {', '.join(available)}")
    return replace(available[name](), recipe=name)


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return a question with the closest of the choices; empty if none is close."""
    near = difflib.get_close_matches(name, choices, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def read_config(values: Mapping[str, Any]) -> Config:
    """Return the config that a run saved, in the class of its recipe's config."""
    if not isinstance(values, Mapping):
        raise UserError(f"config is {repr(values)[:60]}, not an object")
    name = values.get("recipe")
    if not isinstance(name, str) or name not in recipes():
        if values.get("kind") == KIND:
            raise UserError(f"a run of the training function {name} has no model of this program")
        is_path = is_import_path(name)
        hint = f": name it with --use {name} --path DIR (use=, path= in Python)" if is_path else ""
        raise UserError(f"config has a recipe {repr(name)[:60]} that is not known here{hint}")
    if "norm" in values and values["norm"] is None:
        values = {**values, "norm": norms.BASELINE}
    return from_dict(type(recipe(name)), values)


def plain_values(values: Any) -> dict[str, Any]:
    """Return what a run saved as its config, checked and complete if recipe and norm are known."""
    names = [values.get(key) for key in ("recipe", "norm")] if isinstance(values, Mapping) else []
    is_named = set(map(type, names)) == {str}
    if is_named and (names[0] not in recipes() or names[1] not in norms.names()):
        return dict(values)
    return to_dict(read_config(values))


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the config with some settings changed.

    A setting is named by its field, as `epochs` or `optimizer.lr`, by the last part of that where
    one field ends so, as `lr`, or in a mapping, as in `model={"momentum": 0.1}`.
    """
    changed = {name: value for name, value in to_dict(config).items() if name != "shown"}
    fields = flat(changed)
    for name, value in flat(settings).items():
        *parts, last = full_name(name, fields, config.recipe).split(".")
        functools.reduce(dict.__getitem__, parts, changed)[last] = value
    try:
        return read_config(changed)
    except UserError as error:
        raise UsageError(str(error)) from None


def full_name(name: str, fields: Iterable[str], recipe: str) -> str:
    """Return the field of a config that a setting names; UsageError if it is not one."""
    found = [name] if name in fields else [f for f in fields if f.endswith(f".{name}")]
    if len(found) > 1:
        raise UsageError(f"setting {name!r} is one of {' and '.join(found)}")
    if parts := [field for field in fields if field.startswith(f"{name}.")]:
        raise UsageError(f"{name!r} is not one setting: it has {', '.join(parts)}")
    if not found:
        hint = did_you_mean(name, [*fields, *(field.rpartition(".")[2] for field in fields)])
        raise UsageError(f"{recipe} has no setting {name!r}{hint}")
    return found[0]


@dataclass(frozen=True, kw_only=True)
class RecordedConfig(Config):
    """The config class of training functions, and of a user's own tasks that are not imported.

    What they show is in their rows, as `value`. Where higher values are better, the loss of a row
    is the negative value.
    """

    @classmethod
    def measure(cls, settings: Mapping[str, Any]) -> Measure:
        """Return the measure of the values in the rows."""
        higher = True in (settings.get("higher_is_better"), settings.get("shown.higher_is_better"))
        digits, better = settings.get("shown.digits"), "higher" if higher else "lower"
        return Measure(
            name=str(settings.get("shown.name", "value")),
            long=str(settings.get("shown.long", f"value, {better} is better")),
            convert=(lambda loss: -loss) if higher else float,
            digits=digits if type(digits) is int and 0 <= digits < 10 else 4,
            unit=str(settings.get("shown.unit", "values")),
            higher_is_better=higher,
        )


def with_values(values: Mapping[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a run with what the class of its config converts to the measure as loss:
    of a `RecordedConfig` the value that is in the row."""
    if config_class(values) is not RecordedConfig:
        return rows
    sign = -1 if RecordedConfig.measure(flat(values)).higher_is_better else 1
    return [{**r, "loss": sign * r["value"]} if "value" in r else r for r in rows]


def config_class(values: Mapping[str, Any]) -> type[Config]:
    """Return the class of a config: its recipe's, or, of a recipe that is not known here, the first
    that has all its fields."""
    available, name = recipes(), values.get("recipe")
    if isinstance(name, str) and name in available:
        return type(available[name]())
    if values.get("kind") == KIND or values.get("shown"):
        return RecordedConfig
    names, configs = flat(values).keys(), (make() for make in available.values())
    return next((type(c) for c in configs if names <= flat(to_dict(c)).keys()), Config)


def task_of(config: Config) -> Any:
    """Return the class that trains, loads and evaluates what a config describes, a subclass of
    `engine.task.Task`."""
    module, _, name = type(config).task.partition(":")
    return getattr(import_module(module), name)


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
    child_imports[name] = str(root)
    return thing


def _root(module: ModuleType) -> Path:
    """Return the directory in which a top-level module or package is."""
    is_package = hasattr(module, "__path__")
    file = next(iter(module.__path__)) if is_package else getattr(module, "__file__", None)
    return Path(file or sys.prefix).absolute().parent


def import_path(thing: Any) -> str:
    """Return the import path of a function or class; UsageError if it cannot be imported."""
    module = getattr(thing, "__module__", None)
    path = f"{module}:{getattr(thing, '__qualname__', '')}"
    with contextlib.suppress(UserError):
        if module != "__main__" and find(path) is thing:
            return path
    raise UsageError(f"cannot import {path} elsewhere: put it at the top level of a file module.py")


def is_recipe(thing: Any) -> bool:
    """Whether an object is a config class, or a function that needs no arguments and, unlike a
    training function, takes no `log`."""
    if isinstance(thing, type):
        return issubclass(thing, Config)
    if not callable(thing):
        return False
    parameters = inspect.signature(thing).parameters
    return "log" not in parameters and all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        for p in parameters.values()
    )


def use(what: Any, path: str | Path | None = None) -> str:
    """Register a recipe or a normalisation, given by its import path or as an object; return the
    name it is known by: a recipe's is its import path."""
    name = what if isinstance(what, str) else import_path(what)
    thing = find(name, path)
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
            " a config, a config class, or a normrnn.norms.Norm; a training function is for compare"
        )
    make = functools.partial(thing, recipe=name) if isinstance(thing, type) else thing
    if not isinstance(config := make(), Config):
        raise UsageError(f"{name} returned {type(config).__name__}, not a config")
    register(make, name)
    return name


def use_norms(names: Any, path: str | Path | None = None) -> Any:
    """Replace import paths among normalisations by the names that they are known by."""
    if isinstance(names, str):
        return ",".join(use_norms(names.split(","), path))
    return [use(one, path) if is_import_path(one) else one for one in names]


def import_from_parent(imports: Mapping[str, str]) -> None:
    """Import and register in a child process what its parent had in `child_imports`."""
    for name, path in imports.items():
        thing = find(name, path)
        if isinstance(thing, norms.Norm) or is_recipe(thing):
            use(name, path)
