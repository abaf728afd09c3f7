"""Spaces of settings, as data: dotted config fields with values or ranges.

{"optimizer.lr": {"low": 1e-4, "high": 1, "log": true}, "train.batch": [32, 64, 128]}
"""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from normrnn.config.base import MEASURED, Config
from normrnn.config.jsonio import flat, to_dict
from normrnn.config.registry import with_fields
from normrnn.errors import UsageError, UserError
from normrnn.extras import import_extra
from normrnn.files import read_regular
from normrnn.recipes.paper import SPACES

Space = Mapping[str, Any]
"""Dotted field -> a list of values, or {"low", "high"} with "log" or "step" if wished."""
SAMPLERS = ("random", "tpe", "bruteforce")
_NOT_VARIED = ("recipe", "norm", "data", "data_sha256", "device", "threads", "seed", "epochs")
_NOT_VARIED += ("train.epoch_tokens",)
_MOST = 500
"""Settings of a space that are tried on the config before a search."""


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
    check_space(space, config, norms)
    return space


def check_space(space: Any, config: Config, norms: Sequence[str] = ("none",)) -> None:
    """Check that fields exist, that no range is empty, and that the config takes, with every norm,
    all combinations of values and ends, or `_MOST` of them drawn at random."""
    if not isinstance(space, Mapping) or not space:
        raise UsageError("a space is a JSON object of at least one config field")
    fields, ends = flat(to_dict(config)), {}
    for name, values in space.items():
        if name not in fields:
            raise UsageError(f"the space has {name}, which is not a field of {config.recipe}")
        if name in _NOT_VARIED or name.startswith(MEASURED):
            raise UsageError(
                f"the space has {name}: results under different values of it do not say which"
                " setting is better"
            )
        if not (isinstance(values, list) and values):
            found = _range(name, values, type(fields[name]))
            ends[name] = [found.low, found.high]
        else:
            ends[name] = values
    for norm in norms:
        for setting in _combinations(ends):
            try:
                with_fields(config, {**setting, "norm": norm})
            except UserError as error:
                drawn = ", ".join(f"{name} {value!r}" for name, value in setting.items())
                raise UsageError(f"the space has {drawn}: with norm {norm}, {error}") from None


def _range(name: str, values: Any, kind: type) -> Any:
    """Return a range as Optuna's distribution, which checks it; UsageError if it is none."""
    distributions = optuna_module().distributions
    try:
        given = {key: value for key, value in values.items() if value is not None}
        numbers = [value for key, value in given.items() if key != "log"]
        if kind not in (int, float) or not all(type(v) in (int, kind) for v in numbers):
            raise ValueError(f"{kind.__name__} values are needed")
        if not all(map(math.isfinite, numbers)):
            raise ValueError("not finite")
        make = distributions.IntDistribution if kind is int else distributions.FloatDistribution
        return make(**given)
    except (AttributeError, ValueError, TypeError, OverflowError) as error:
        raise UsageError(
            f"the space gives {name} as {values!r}, neither a list of values nor low and high:"
            f" {error}"
        ) from None


def _combinations(ends: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    if math.prod(map(len, ends.values())) <= _MOST:
        for values in product(*ends.values()):
            yield dict(zip(ends, values, strict=True))
        return
    generator = random.Random(0)
    for _ in range(_MOST):
        yield {name: generator.choice(values) for name, values in ends.items()}


def optuna_module() -> Any:
    """Import Optuna; UserError with an install command if it is missing."""
    optuna = import_extra("optuna", "search")
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    return optuna


def grid(space: Space, config: Config) -> list[dict[str, Any]]:
    """Return every setting of a space; UsageError for a range without steps."""
    fields, values = flat(to_dict(config)), {}
    for name, given in space.items():
        values[name] = given
        if isinstance(given, Mapping):
            found = _range(name, given, type(fields[name]))
            if found.step is None or found.log:
                raise UsageError(
                    f"the sampler bruteforce tries every value: give {name} as a list, or its"
                    " range with a step"
                )
            count = math.floor((found.high - found.low) / found.step + 1e-9) + 1
            values[name] = [found.low + i * found.step for i in range(count)]
    return [dict(zip(values, drawn, strict=True)) for drawn in product(*values.values())]


def draw(
    space: Space, config: Config, sampler: str, number: int, before: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the setting of a trial, drawn by Optuna; `before` are rows of the study."""
    optuna, fields = optuna_module(), flat(to_dict(config))
    makers = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}
    seed = (config.seed * 1_000_003 + number) % 2**32
    study = optuna.create_study(sampler=makers[sampler](seed=seed))
    distributions = {
        name: optuna.distributions.CategoricalDistribution(values)
        if isinstance(values, list)
        else _range(name, values, type(fields[name]))
        for name, values in space.items()
    }
    for row in before:
        value = math.inf if row["value"] is None else row["value"]
        found = {"params": row["settings"], "distributions": distributions, "value": value}
        study.add_trial(optuna.trial.create_trial(**found))
    return study.ask(distributions).params
