"""The recipes and tasks that are known, without importing what trains them.

A recipe is a function that returns a complete config. The config's class is the torch-free half of
its task; its `task` names the class with the other half, imported when a network is built.
`normrnn.recipes` registers the recipes of this package, and is imported when somebody asks.
"""

import difflib
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from normrnn.config.base import Config
from normrnn.config.jsonio import flat, from_dict, to_dict
from normrnn.errors import UsageError, UserError
from normrnn.norms import BASELINE

OURS = "normrnn.recipes"

_RECIPES: dict[str, Callable[[], Config]] = {}


def register(make: Callable[[], Config]) -> None:
    """A recipe under the name that its config carries; the first line of its docstring says what
    it is. A name that is taken is an error."""
    name = make().recipe
    if name in _RECIPES:
        raise ValueError(f"there is a recipe {name!r} already")
    _RECIPES[name] = make


def unregister(name: str) -> None:
    """Take a recipe out again."""
    del _RECIPES[name]


def recipes() -> Mapping[str, Callable[[], Config]]:
    """Name -> function."""
    import_module(OURS)
    return _RECIPES


def recipe(name: str) -> Config:
    """The config of the named recipe; an unknown name is an error that lists the choices."""
    known = recipes()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise UsageError(f"no recipe {name!r}{hint} There are: {', '.join(known)}")
    return known[name]()


def read_config(values: Mapping[str, Any]) -> Config:
    """The config that a run saved; its recipe's name says of which kind it is."""
    name = values.get("recipe") if isinstance(values, Mapping) else None
    if not isinstance(name, str) or name not in recipes():
        raise UserError(f"config has a recipe {repr(name)[:60]} that is not known here")
    if "norm" in values and values["norm"] is None:
        values = {**values, "norm": BASELINE}
    return from_dict(type(recipe(name)), values)


def config_class(values: Mapping[str, Any]) -> type[Config]:
    """The class of the config that `values` are: their recipe's, or, of a recipe that is not known
    here, the first that knows most of their fields."""
    known = recipes()
    name = values.get("recipe")
    if isinstance(name, str) and name in known:
        return _kind(known[name])[0]
    given = flat(values).keys()
    kinds = [_kind(make) for make in known.values()]
    return min(kinds, key=lambda kind: len(given - kind[1]))[0]


@cache
def _kind(make: Callable[[], Config]) -> tuple[type[Config], frozenset[str]]:
    """The class and the fields of a recipe's config."""
    config = make()
    return type(config), frozenset(flat(to_dict(config)))


def task_of(config: Config) -> Any:
    """Return the class that trains, loads and evaluates what a config describes, a subclass of
    `engine.task.Task`."""
    module, _, name = type(config).task.partition(":")
    return getattr(import_module(module), name)
