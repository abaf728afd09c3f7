"""The recipes and tasks that are known, without importing what trains them.

A recipe is a function that returns a complete config. The config's class is the torch-free half of
its task; its `task` names the class with the other half, imported when a network is built.
`normrnn.recipes` registers the recipes of this package, and is imported when it is needed.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, TypeVar

from normrnn.config.base import Config
from normrnn.config.jsonio import flat, from_dict, to_dict
from normrnn.config.measure import Measure
from normrnn.errors import UsageError, UserError
from normrnn.norms import BASELINE

KIND = "function"
"""What config.json of a stored run of a training function has as `kind`."""
Recipe = TypeVar("Recipe", bound=Callable[[], Config])
_RECIPES: dict[str, Callable[[], Config]] = {}


def register(make: Recipe, name: str | None = None) -> Recipe:
    """Register a recipe under a name, by default the one that its config has, and return it.

    The first line of its docstring is its summary. ValueError for a name that is taken.
    """
    if name is None:
        name = make().recipe
    if name in _RECIPES:
        raise ValueError(f"there is a recipe {name!r} already")
    _RECIPES[name] = make
    return make


def unregister(name: str) -> None:
    """Remove a recipe."""
    del _RECIPES[name]


def recipes() -> Mapping[str, Callable[[], Config]]:
    """Return name -> function, those of this package first."""
    import_module("normrnn.recipes")
    return _RECIPES


def recipe(name: str) -> Config:
    """Return the config of the named recipe; UsageError that lists the choices if unknown."""
    available = recipes()
    if name not in available:
        hint = did_you_mean(name, available)
        raise UsageError(f"no recipe {name!r}{hint}. There are: {', '.join(available)}")
    return replace(available[name](), recipe=name)


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return a question with the closest of the choices; empty if none is close."""
    near = difflib.get_close_matches(name, choices, n=1)
    return f"; did you mean {near[0]}?" if near else ""


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
    fields = flat(to_dict(config))
    changes: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            changes |= {f"{name}.{key}": one for key, one in value.items()}
            continue
        inside = [field for field in fields if field.endswith(f".{name}")]
        if name not in fields and len(inside) > 1:
            raise UsageError(f"setting {name!r} is one of {' and '.join(inside)}")
        changes[name if name in fields or not inside else inside[0]] = value
    for name in changes.keys() - fields.keys():
        hint = did_you_mean(name, [*fields, *(field.rpartition(".")[2] for field in fields)])
        raise UsageError(f"{config.recipe} has no setting {name!r}{hint}")
    return with_fields(config, changes)


@dataclass(frozen=True, kw_only=True)
class FunctionConfig(Config):
    """The config class of training functions; their settings are what they were called with.

    Where higher values are better, the loss of a row is the negative value.
    """

    noun: ClassVar[str] = "a training function"

    @classmethod
    def measure(cls, settings: Mapping[str, Any]) -> Measure:
        """Return the measure of the values that were logged."""
        higher = settings.get("higher_is_better") is True
        return Measure(
            name="value",
            long="value, higher is better" if higher else "value, lower is better",
            convert=(lambda loss: -loss) if higher else float,
            digits=4,
            unit="values",
            higher_is_better=higher,
        )


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
