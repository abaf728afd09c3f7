"""What a search is about: the experiment, the space, the arms, how settings are drawn."""

import importlib.util
import json
from dataclasses import dataclass
from typing import Any

from normrnn.config.base import Config
from normrnn.config.jsonio import flat, to_dict
from normrnn.errors import UsageError, UserError
from normrnn.recipes import read_config
from normrnn.runs.store import DATA_CHANGED
from normrnn.search.space import Space

SAMPLERS = {
    "random": "RandomSampler",
    "tpe": "TPESampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "qmc": "QMCSampler",
    "nsgaii": "NSGAIISampler",
    "bruteforce": "BruteForceSampler",
}
NEEDS = {"gp": "scipy", "qmc": "scipy", "cmaes": "cmaes"}
"""What Optuna imports only when it draws."""
PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "hyperband": "HyperbandPruner",
    "successivehalving": "SuccessiveHalvingPruner",
}


@dataclass(frozen=True)
class Plan:
    """What a study is about; workers share one only if they mean the same."""

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
        """Plain values. Where the data lies and how it is computed may differ between workers."""
        config = to_dict(self.config)
        for name in ("data", "device", "threads", "norm"):
            del config[name]
        names = ("norms", "sampler", "pruner", "space")
        return json.loads(json.dumps({n: getattr(self, n) for n in names} | {"config": config}))

    def changes(self, other: dict[str, Any]) -> str:
        """In what another identity differs, in words; empty if it does not."""
        a, b = flat(other), flat(self.identity())
        changed = [k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
        if "config.recipe" in changed:
            changed = ["config.recipe"]
        data = "config.data_sha256"  # a hash tells nobody anything
        return ", ".join(
            DATA_CHANGED
            if k == data
            else f"{k.removeprefix('config.')} was {a.get(k)}, is now {b.get(k)}"
            for k in changed
        )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {**self.identity(), "config": to_dict(self.config)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Plan":
        """In another process."""
        config, norms = read_config(values["config"]), tuple(values["norms"])
        return Plan(config, values["space"], norms, values["sampler"], values["pruner"])
