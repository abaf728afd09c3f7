"""The recipes and tasks that are known, without importing what trains them.

A recipe is a function that returns a complete config. The config's class is the torch-free half of
its task; its `task` names the class with the other half, imported when a network is built.
`normrnn.recipes` registers the recipes of this package, and is imported when it is needed.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

from normrnn.config.base import Config
from normrnn.config.function import KIND, FunctionConfig
from normrnn.config.jsonio import flat, from_dict, to_dict
from normrnn.errors import UsageError, UserError
from normrnn.norms import BASELINE

OURS = "normrnn.recipes"

_RECIPES: dict[str, Callable[[], Config]] = {}


def register(make: Callable[[], Config], name: str | None = None) -> None:
    """Register a recipe under a name, by default the one that its config has.

    The first line of its docstring is its summary. ValueError for a name that is taken.
    """
    if name is None:
        name = make().recipe
    if name in _RECIPES:
        raise ValueError(f"there is a recipe {name!r} already")
    _RECIPES[name] = make


def unregister(name: str) -> None:
    """Remove a recipe."""
    del _RECIPES[name]


def recipes() -> Mapping[str, Callable[[], Config]]:
    """Return name -> function, those of this package first."""
    import_module(OURS)
    return _RECIPES


def recipe(name: str) -> Config:
    """Return the config of the named recipe; UsageError that lists the choices if unknown."""
    available = recipes()
    if name not in available:
        near = difflib.get_close_matches(name, available, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise UsageError(f"no recipe {name!r}{hint} There are: {', '.join(available)}")
    return replace(available[name](), recipe=name)


def read_config(values: Mapping[str, Any]) -> Config:
    """Return the config that a run saved, in the class of its recipe's config."""
    name = values.get("recipe") if isinstance(values, Mapping) else None
    if not isinstance(name, str) or name not in recipes():
        hint = ": name it with --use" if isinstance(name, str) and ":" in name else ""
        raise UserError(f"config has a recipe {repr(name)[:60]} that is not known here{hint}")
    if "norm" in values and values["norm"] is None:
        values = {**values, "norm": BASELINE}
    return from_dict(type(recipe(name)), values)


def with_fields(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the config with these fields, given by their dotted names, changed."""
    changed = to_dict(config)
    for name, value in values.items():
        *parts, last = name.split(".")
        at = changed
        for part in parts:
            at = at[part]
        at[last] = value
    return read_config(changed)


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the config with settings as a call in Python gives them.

    A setting is named by its field, as in `epochs=2` or `hidden=64`; where several parts have a
    field of that name, by its part, as in `model={"momentum": 0.1}`.
    """
    fields, changes = flat(to_dict(config)), {}
    for name, value in settings.items():
        inside = [field for field in fields if field.endswith(f".{name}")]
        if isinstance(value, Mapping):
            changes |= {f"{name}.{key}": one for key, one in value.items()}
        elif name in fields or len(inside) != 1:
            changes[name] = value
        else:
            changes[inside[0]] = value
    for name in changes.keys() - fields.keys():
        inside = [field for field in fields if field.endswith(f".{name}")]
        near = inside or difflib.get_close_matches(
            name, [*fields, *(f.rpartition(".")[2] for f in fields)], n=1
        )
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(f"{config.recipe} has no setting {name!r}{hint}")
    return with_fields(config, changes)


def config_class(values: Mapping[str, Any]) -> type[Config]:
    """Return the class of a config: its recipe's, or, of a recipe that is not known here, the first
    that has all its fields."""
    if values.get("kind") == KIND:
        return FunctionConfig
    available = recipes()
    name = values.get("recipe")
    if isinstance(name, str) and name in available:
        return _kind(available[name])[0]
    names = flat(values).keys()
    kinds = [_kind(make) for make in available.values()]
    return next((kind for kind, fields in kinds if names <= fields), Config)


@cache
def _kind(make: Callable[[], Config]) -> tuple[type[Config], frozenset[str]]:
    """Return the class and the fields of a recipe's config."""
    config = make()
    return type(config), frozenset(flat(to_dict(config)))


def task_of(config: Config) -> Any:
    """Return the class that trains, loads and evaluates what a config describes, a subclass of
    `engine.task.Task`."""
    module, _, name = type(config).task.partition(":")
    return getattr(import_module(module), name)
