"""Runs put together: those that differ in normalisation and seed alone can be compared."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from normrnn.config.jsonio import flat, to_dict
from normrnn.recipes import RECIPES, recipe
from normrnn.report.measure import PAPER, Measure, Paper, measure
from normrnn.report.runs import Found, Run

_APART = ("norm", "seed")
# What changes nothing in the curves of a run, or only in those of a normalised one.
_NORMALISER = ("model.gamma", "model.eps", "model.momentum", "model.time_steps")
_HARMLESS = ("threads", "device", "data", "epochs", "train.log_every", "train.checkpoint_every")
_HARMLESS += ("evaluation.train_tokens",)


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed alone. `index` is 0 for the baseline, 1 for the normalised
    arm of the paper, or the first."""

    name: str
    norm: str
    index: int
    runs: list[Run]


@dataclass(frozen=True)
class Group:
    """Runs of one recipe that can be compared; `variant` sets them apart from its other runs."""

    recipe: str
    variant: str
    runs: list[Run]

    @property
    def title(self) -> str:
        """The recipe, and what is special here."""
        return f"{self.recipe}, {self.variant}" if self.variant else self.recipe

    @property
    def measure(self) -> Measure:
        """What these runs are measured in."""
        return measure(self.runs)

    @property
    def paper(self) -> Paper | None:
        """The paper's figures, where the recipe reproduces some."""
        return PAPER.get(self.recipe)

    @property
    def arms(self) -> list[Arm]:
        """The baseline first, then the paper's normalisation, then others."""
        kinds: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs:
            normaliser = [k for k in _NORMALISER if run.norm != "none" and k in run.settings]
            key = (run.norm, ", ".join(f"{k} {run.settings[k]}" for k in normaliser))
            kinds.setdefault(key, []).append(run)
        papers = self.paper.norm if self.paper else ""
        order = sorted(kinds, key=lambda k: (k[0] != "none", k[0] != papers))
        first = 0 if order and order[0][0] == "none" else 1
        norms = [norm for norm, _ in order]
        return [
            Arm(
                _arm_name(norm) + (f" ({special})" if norms.count(norm) > 1 else ""),
                norm,
                first + i,
                sorted(kinds[norm, special], key=lambda run: run.seed),
            )
            for i, (norm, special) in enumerate(order)
        ]


def without_repeats(found: Sequence[Found]) -> list[Found]:
    """Of runs with the same settings and seed, the one that got furthest; the others say so."""
    furthest: dict[tuple[object, ...], Run] = {}
    for run in (one.run for one in found if one.run is not None):
        other = furthest.get(_identity(run))
        if other is None or run.updates > other.updates:
            furthest[_identity(run)] = run
    result = []
    for one in found:
        kept = furthest[_identity(one.run)] if one.run is not None else None
        if one.run is not None and kept is not None and kept is not one.run:
            why = f"is left out: {kept.path.name} is the same run ({kept.label}) and got as far"
            result.append(Found(one.path, None, why))
        else:
            result.append(one)
    return result


def _identity(run: Run) -> tuple[object, ...]:
    normaliser = [str(run.settings.get(k)) for k in _NORMALISER]
    return (run.recipe, run.norm, run.seed, _key(run), *normaliser)


def _arm_name(norm: str) -> str:
    return "baseline" if norm == "none" else norm


def groups(runs: Sequence[Run]) -> list[Group]:
    """Comparable runs together, in the order of their first."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], list[Run]] = {}
    for run in runs:
        found.setdefault((run.recipe, _key(run)), []).append(run)
    result = []
    for (name, key), members in found.items():
        others = [set(k) for n, k in found if n == name]
        special = set(key) - set.intersection(*others)
        words = [f"{k} {v}" for k, v in sorted(special) if k != "data_sha256"]
        if any(k == "data_sha256" for k, _ in special):
            words.append(f"data {data_name(members[0])}")
        result.append(Group(name, ", ".join(words), members))
    return result


def _key(run: Run) -> tuple[tuple[str, str], ...]:
    left_out = (*_APART, *_HARMLESS, *_NORMALISER)
    return tuple(
        (name, str(value)) for name, value in sorted(run.settings.items()) if name not in left_out
    )


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Settings besides norm and seed in which runs differ, with the value of each run."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: [run.settings.get(name) for run in runs] for name in names}
    left_out = (*_APART, "data")  # its hash says whether it is the same
    return {
        name: found
        for name, found in values.items()
        if name not in left_out and any(value != found[0] for value in found)
    }


def data_name(run: Run) -> str:
    """The data without the path that leads to it."""
    data = str(run.settings.get("data", ""))
    return data if data.startswith("builtin:") else PurePath(data).name


def command(run: Run) -> str:
    """What to type to repeat a run; the data by name."""
    known = run.recipe in RECIPES
    defaults = flat(to_dict(recipe(run.recipe))) if known else {}
    words = ["normrnn", "train", run.recipe or "RECIPE"]
    for name, value in run.settings.items():
        if name in ("recipe", "data_sha256") or defaults.get(name) == value:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            *parents, last = flag.split(".")
            words.append("--" + ".".join([*parents, last if value else f"no-{last}"]))
        else:
            words += [f"--{flag}", data_name(run) if name == "data" else str(value)]
    return shlex.join(words)
