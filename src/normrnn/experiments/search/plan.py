"""The plan of a search: the experiment, the space, the norms, how settings are drawn."""

import importlib.util
import json
from dataclasses import dataclass
from typing import Any

from normrnn.config.base import Config
from normrnn.config.jsonio import flat, to_dict
from normrnn.errors import UsageError, UserError
from normrnn.experiments.search.space import Space
from normrnn.recipes import read_config
from normrnn.runs.store import DATA_CHANGED

# Not CmaEsSampler: it keeps its state in the storage as a pickle, and unpickles what it finds.
SAMPLERS = {
    "random": "RandomSampler",
    "tpe": "TPESampler",
    "gp": "GPSampler",
    "qmc": "QMCSampler",
    "nsgaii": "NSGAIISampler",
    "bruteforce": "BruteForceSampler",
}
NEEDS = {"gp": "scipy", "qmc": "scipy"}
"""Packages that Optuna imports when it draws."""
PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "hyperband": "HyperbandPruner",
    "successivehalving": "SuccessiveHalvingPruner",
}

_OWN = ("data", "device", "threads", "norm")
"""Settings that differ between workers, or between norms."""


@dataclass(frozen=True)
class Plan:
    """What a study searches; workers share a study only if their plans agree."""

    config: Config
    space: Space
    norms: tuple[str, ...] = ("none", "hidden")
    sampler: str = "random"
    pruner: str = "none"

    def __post_init__(self) -> None:
        for what, name, known in (
            ("sampler", self.sampler, SAMPLERS),
            ("pruner", self.pruner, PRUNERS),
        ):
            if name not in known:
                raise UsageError(f"no {what} {name!r}: there are {', '.join(sorted(known))}")
        package = NEEDS.get(self.sampler)
        if package and importlib.util.find_spec(package) is None:
            raise UserError(f"the sampler {self.sampler} needs {package}: pip install {package}")
        if self.sampler == "bruteforce":
            fields = flat(to_dict(self.config))
            for name, values in self.space.items():
                endless = isinstance(values, dict) and values.get("step") is None
                if endless and type(fields[name]) is float:
                    raise UsageError(
                        f"the sampler bruteforce tries every value: give {name} as a list, or its"
                        " range with a step"
                    )

    def identity(self) -> dict[str, Any]:
        """Return plain values, without what may differ between workers: paths, threads, devices."""
        names = ("norms", "sampler", "pruner", "space")
        values = {n: getattr(self, n) for n in names} | {"config": _shared(self.config)}
        return json.loads(json.dumps(values))

    def changes(self, other: dict[str, Any]) -> str:
        """Return in words how another identity differs; empty if it does not."""
        a, b = flat(other), flat(self.identity())
        changed = [k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
        if "config.recipe" in changed:
            changed = ["config.recipe"]
        data = "config.data_sha256"
        return ", ".join(
            DATA_CHANGED
            if k == data
            else f"{k.removeprefix('config.')} was {a.get(k)}, is now {b.get(k)}"
            for k in changed
        )

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {**self.identity(), "config": to_dict(self.config)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Plan":
        """Return the plan of these values, in another process."""
        config, norms = read_config(values["config"]), tuple(values["norms"])
        return Plan(config, values["space"], norms, values["sampler"], values["pruner"])


def _shared(config: Config) -> dict[str, Any]:
    """Return the settings that all workers of a study share."""
    return {k: v for k, v in to_dict(config).items() if k not in _OWN}
