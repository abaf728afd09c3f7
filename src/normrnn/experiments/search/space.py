"""What a search varies, as data: dotted config fields with values or ranges.

{"optimizer.lr": {"low": 1e-4, "high": 1, "log": true}, "train.batch": [32, 64, 128]}
"""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normrnn.config.base import MEASURED, Config
from normrnn.config.jsonio import flat, to_dict
from normrnn.config.registry import with_fields
from normrnn.errors import UsageError, UserError
from normrnn.files import read_regular
from normrnn.recipes.paper import SPACES

if TYPE_CHECKING:
    from optuna import Trial

Space = dict[str, Any]
"""Dotted field -> a list of values, or {"low", "high"} with "log" or "step" if wished."""

MOST = 500
"""Settings of a space that are tried on the config before a search."""
ANOTHER_LOSS = "losses under different values of it are losses of different things"
NOT_VARIED = ("recipe", "norm", "data", "data_sha256", "device", "threads")


def read_space(file: Path | None, config: Config, norms: Sequence[str] = ("none",)) -> Space:
    """Return the space of a file, or the recipe's; UsageError if it cannot be searched."""
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
    """Check that fields exist, that no range is empty, and that the config takes, with every norm,
    all combinations of values and ends, or `MOST` of them drawn at random."""
    if not isinstance(space, Mapping) or not space:
        raise UsageError("a space is a JSON object of at least one config field")
    fields, ends = flat(to_dict(config)), {}
    for name, values in space.items():
        if name not in fields:
            raise UsageError(f"the space has {name}, which is not a field of {config.recipe}")
        if name in NOT_VARIED:
            raise UsageError(f"the space has {name}, which a search does not vary")
        if name.startswith(MEASURED):
            raise UsageError(f"the space has {name}: {ANOTHER_LOSS}")
        ends[name] = _ends(name, values, type(fields[name]))
    for norm in norms:
        for setting in _settings(ends):
            try:
                with_fields(config, {**setting, "norm": norm})
            except UserError as error:
                drawn = ", ".join(f"{name} {value!r}" for name, value in setting.items())
                raise UsageError(f"the space has {drawn}: with norm {norm}, {error}") from None


def _settings(ends: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    if math.prod(map(len, ends.values())) <= MOST:
        for values in product(*ends.values()):
            yield dict(zip(ends, values, strict=True))
        return
    generator = random.Random(0)
    for _ in range(MOST):
        yield {name: generator.choice(values) for name, values in ends.items()}


def _ends(name: str, values: Any, kind: type) -> list[Any]:
    """Return the values, or the ends of a range, which Optuna checks."""
    if isinstance(values, list) and values:
        return values
    if not isinstance(values, Mapping) or not {"low", "high"} <= values.keys():
        raise UsageError(
            f"the space gives {name} as {values!r}: give a list of values, or low and high"
        )
    from optuna.distributions import FloatDistribution, IntDistribution

    given = {key: value for key, value in values.items() if value is not None}
    numbers = [value for key, value in given.items() if key != "log"]
    if kind not in (int, float) or not all(type(v) in (int, kind) for v in numbers):
        raise UsageError(f"the range of {name} has to be of {kind.__name__} values: {values}")
    try:
        if not all(math.isfinite(v) for v in numbers):
            raise ValueError("not finite")
        (IntDistribution if kind is int else FloatDistribution)(**given)
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"the range {values} of {name} cannot be searched: {error}") from None
    return [values["low"], values["high"]]


def draw(trial: "Trial", space: Space, config: Config) -> dict[str, Any]:
    """Return one setting: field -> value."""
    fields, setting = flat(to_dict(config)), {}
    for name, values in space.items():
        if isinstance(values, list):
            setting[name] = trial.suggest_categorical(name, values)
            continue
        suggest = trial.suggest_int if type(fields[name]) is int else trial.suggest_float
        setting[name] = suggest(name, **{k: v for k, v in values.items() if v is not None})
    return setting
