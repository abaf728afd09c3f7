"""What a search varies, as data: dotted config fields with values or ranges. No torch, no Optuna.

{"optimizer.lr": {"low": 1e-4, "high": 1, "log": true}, "train.batch": [32, 64, 128]}
"""

import json
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Protocol

from normrnn.config.base import MEASURED, Config
from normrnn.config.jsonio import to_dict
from normrnn.config.registry import with_fields
from normrnn.errors import UsageError, UserError
from normrnn.files import read_regular
from normrnn.recipes.paper import SPACES

Space = dict[str, Any]
"""Dotted field -> a list of values, or {"low", "high"} with "log" or "step" if wished."""

MOST = 500
"""Settings of a space that are tried on the config before a search."""
ANOTHER_LOSS = "losses under different values of it are losses of different things"
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
            space = json.loads(read_regular(file))
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{file} is not JSON: {error}") from None
    check(space, config, norms)
    return space


def check(space: Any, config: Config, norms: Sequence[str] = ("none",)) -> None:
    """Every field exists, no range is empty, and the config takes what may be drawn, with every
    arm: all settings of values and ends, or `MOST` of them."""
    if not isinstance(space, Mapping) or not space:
        raise UsageError("a space is a JSON object of at least one config field")
    ends: dict[str, list[Any]] = {}
    for name, values in space.items():
        if name in NOT_VARIED:
            raise UsageError(f"the space has {name}, which a search does not vary")
        if name.startswith(MEASURED):
            raise UsageError(f"the space has {name}: {ANOTHER_LOSS}")
        ends[name] = _ends(name, values, type(_find(config, name)))
    for norm in norms:
        for setting in _settings(ends):
            if _refused(config, norm, setting):
                raise UsageError(_complaint(config, norm, setting))


def _settings(ends: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    if math.prod(map(len, ends.values())) <= MOST:
        for values in product(*ends.values()):
            yield dict(zip(ends, values, strict=True))
        return
    generator = random.Random(0)
    for _ in range(MOST):
        yield {name: generator.choice(values) for name, values in ends.items()}


def _refused(config: Config, norm: str, setting: Mapping[str, Any]) -> str:
    try:
        with_fields(config, {**setting, "norm": norm})
    except UserError as error:
        return str(error)
    return ""


def _complaint(config: Config, norm: str, setting: Mapping[str, Any]) -> str:
    """What is wrong with a setting, without the fields that have no part in it."""
    complaint = _refused(config, norm, setting)
    for name in setting:
        fewer = {k: v for k, v in setting.items() if k != name}
        if _refused(config, norm, fewer) == complaint:
            setting = fewer
    drawn = " with ".join(f"{name} {value!r}" for name, value in setting.items())
    return f"the space has {drawn}: {complaint}" if setting else f"norm {norm}: {complaint}"


def draw(trial: Suggests, space: Space, config: Config) -> dict[str, Any]:
    """One setting: field -> value."""
    return {name: _draw(trial, name, values, config) for name, values in space.items()}


def _draw(trial: Suggests, name: str, values: Any, config: Config) -> Any:
    if isinstance(values, list):
        return trial.suggest_categorical(name, values)
    suggest = trial.suggest_int if type(_find(config, name)) is int else trial.suggest_float
    return suggest(name, **{k: v for k, v in values.items() if v is not None})


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
    low, high = values["low"], values["high"]
    log, step = values.get("log"), values.get("step")
    numbers = [low, high] if step is None else [low, high, step]
    if kind not in (int, float) or not all(type(v) in (int, float) for v in numbers):
        raise UsageError(f"the range of {name} is not one of numbers: give a list of values")
    if not all(-sys.float_info.max <= v <= sys.float_info.max for v in numbers):
        raise UsageError(f"the range of {name} needs finite numbers")
    if kind is int and not all(type(v) is int for v in numbers):
        raise UsageError(f"the range of {name} needs whole numbers")
    if not low <= high:
        raise UsageError(f"the range of {name} is empty: low {low} is above high {high}")
    if log not in (None, True, False) or (log and (low <= 0 or step is not None)):
        raise UsageError(f"the range of {name} with log needs a low above 0 and no step")
    if step is not None and not step > 0:
        raise UsageError(f"the range of {name} needs a step above 0, not {step}")
    return [low, high]
