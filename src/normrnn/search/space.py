"""What a search varies, as data: dotted config fields with values or ranges. No torch, no Optuna.

{"optimizer.lr": {"low": 1e-4, "high": 1, "log": true}, "train.batch": [32, 64, 128]}
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, Protocol

from normrnn.errors import UsageError, UserError
from normrnn.recipes import read_config
from normrnn.recipes.config import Config
from normrnn.recipes.jsonio import to_dict

Space = dict[str, Any]
"""Dotted field -> a list of values, or {"low", "high"} with "log" or "step" if wished."""

SPACES: dict[str, Space] = {
    # The appendix's.
    "ptb-char": {
        "optimizer.lr": {"low": 1e-4, "high": 1.0, "log": True},
        "optimizer.momentum": [0.5, 0.8, 0.9, 0.95, 0.995],
        "train.batch": [32, 64, 128],
    }
}
NOT_VARIED = ("recipe", "norm", "data", "data_sha256", "device", "threads")


class Suggests(Protocol):
    """The part of an Optuna trial that draws."""

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float: ...

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int: ...

    def suggest_categorical(self, name: str, choices: Any) -> Any: ...


def read_space(file: Path | None, config: Config, norms: Sequence[str] = ("none",)) -> Space:
    """The space of a file, or the recipe's own; UsageError for one that cannot be searched."""
    if file is None:
        if config.recipe not in SPACES:
            raise UsageError(
                f"{config.recipe} has no space of its own: pass --space FILE, a JSON object such"
                ' as {"optimizer.lr": {"low": 0.01, "high": 10, "log": true},'
                ' "train.batch": [20, 32]}'
            )
        space = SPACES[config.recipe]
    else:
        try:
            space = json.loads(file.read_bytes())
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"{file} is not JSON: {error}") from None
    check(space, config, norms)
    return space


def check(space: Any, config: Config, norms: Sequence[str] = ("none",)) -> None:
    """Every field exists, no range is empty, and the config takes every end and value, with every
    arm and with every other field's: what it refuses later would stop the study for good."""
    if not isinstance(space, Mapping) or not space:
        raise UsageError("a space is a JSON object of at least one config field")
    ends: dict[str, list[Any]] = {}
    for name, values in space.items():
        if name in NOT_VARIED:
            raise UsageError(f"the space has {name}, which a search does not vary")
        ends[name] = _ends(name, values, type(_find(config, name)))
    for norm in norms:
        for setting in ({}, *_settings(ends)):
            try:
                with_fields(config, {**setting, "norm": norm})
            except UserError as error:
                drawn = " with ".join(f"{name} {value!r}" for name, value in setting.items())
                said = f"the space has {drawn}: {error}" if setting else f"norm {norm}: {error}"
                raise UsageError(said) from None


def _settings(ends: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Every value by itself, then with every value of another field."""
    for size in (1, 2):
        for names in combinations(ends, size):
            for values in product(*(ends[name] for name in names)):
                yield dict(zip(names, values, strict=True))


def with_fields(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with these dotted fields changed."""
    changed = to_dict(config)
    for name, value in values.items():
        *path, last = name.split(".")
        at = changed
        for part in path:
            at = at[part]
        at[last] = value
    return read_config(changed)


def draw(trial: Suggests, space: Space, config: Config) -> dict[str, Any]:
    """One setting: field -> value."""
    return {name: _draw(trial, name, values, config) for name, values in space.items()}


def _draw(trial: Suggests, name: str, values: Any, config: Config) -> Any:
    if isinstance(values, list):
        return trial.suggest_categorical(name, values)
    suggest = trial.suggest_int if type(_find(config, name)) is int else trial.suggest_float
    return suggest(name, **values)


def _find(config: Config, name: str) -> Any:
    at: Any = to_dict(config)
    for part in name.split("."):
        if not isinstance(at, Mapping) or part not in at:
            raise UsageError(f"the space has {name}, which is no field of {config.recipe}")
        at = at[part]
    if isinstance(at, Mapping):
        raise UsageError(f"the space has {name}, which is a group of fields of {config.recipe}")
    return at


def _ends(name: str, values: Any, kind: type) -> list[Any]:
    if isinstance(values, list):
        if not values:
            raise UsageError(f"the space has no values for {name}")
        return values
    if not isinstance(values, Mapping) or not {"low", "high"} <= values.keys():
        raise UsageError(
            f"the space gives {name} as {values!r}: give a list of values, or low and high"
        )
    unknown = values.keys() - {"low", "high", "log", "step"}
    if unknown:
        raise UsageError(f"the range of {name} has {min(unknown)!r}: only low, high, log and step")
    low, high, log, step = (values.get(k) for k in ("low", "high", "log", "step"))
    numbers = [v for v in (low, high, step) if v is not None]
    if kind not in (int, float) or not all(type(v) in (int, float) for v in numbers):
        raise UsageError(f"the range of {name} is not one of numbers: give a list of values")
    if not all(math.isfinite(v) for v in numbers):
        raise UsageError(f"the range of {name} needs finite numbers")
    if kind is int and not all(type(v) is int for v in numbers):
        raise UsageError(f"the range of {name} needs whole numbers")
    assert low is not None
    assert high is not None
    if not low <= high:
        raise UsageError(f"the range of {name} is empty: low {low} is above high {high}")
    if log not in (None, True, False) or (log and (low <= 0 or step is not None)):
        raise UsageError(f"the range of {name} with log needs a low above 0 and no step")
    if step is not None and not step > 0:
        raise UsageError(f"the range of {name} needs a step above 0, not {step}")
    return [low, high]
