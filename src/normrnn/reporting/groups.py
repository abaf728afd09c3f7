"""Groups of comparable runs: those that differ only in normalisation and seed."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from normrnn.config.base import MEASURED
from normrnn.config.jsonio import flat, to_dict
from normrnn.config.measure import Measure
from normrnn.config.registry import config_class
from normrnn.recipes import RECIPES, recipe
from normrnn.recipes.paper import PAPER, Paper
from normrnn.reporting.runs import Run, RunOrProblem

_APART, _DATA = ("norm", "seed"), "data_sha256"
# Settings that distinguish arms only with a normaliser, and settings that change no curve.
_NORMALISER = ("gamma", "eps", "momentum", "time_steps", "cell_norm", "count_padding")
_NORMALISER += ("shrinkage", "freeze_after")
_NORMALISER = tuple(f"model.{name}" for name in _NORMALISER)
_HARMLESS = ("threads", "device", "data", "epochs", "train.log_every", "train.checkpoint_every")
_HARMLESS += ("evaluation.train_tokens", "shared_initialisation")
Settings = tuple[tuple[str, str], ...]
_SIDES = ((False,), (True,), (False, True))
"""Baselines alone, normalised networks alone, both."""


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seed. `index` is 0 for the baseline, 1 for the paper's
    normalisation or the first one."""

    name: str
    norm: str
    index: int
    runs: list[Run]


@dataclass(frozen=True)
class Group:
    """Comparable runs of one recipe; `variant` names what distinguishes them."""

    recipe: str
    variant: str
    runs: list[Run]

    @property
    def title(self) -> str:
        """The recipe, and what distinguishes the group."""
        return f"{self.recipe}, {self.variant}" if self.variant else self.recipe

    @property
    def measure(self) -> Measure:
        """The measure of the task."""
        return measure(self.runs)

    @property
    def paper(self) -> Paper | None:
        """The paper's figures, where the recipe reproduces some."""
        return PAPER.get(self.recipe)

    @property
    def arms(self) -> list[Arm]:
        """Arms named by their differing settings: baseline, the paper's normalisation, others."""
        kinds: dict[tuple[str, Settings], list[Run]] = {}
        for run in furthest(self.runs):
            kinds.setdefault((run.norm, _arm_settings(run)), []).append(run)
        papers = self.paper.norm if self.paper else ""

        def place(kind: tuple[str, Settings]) -> tuple[object, ...]:
            norm, settings = kind
            return kinds[kind][0].normalisation.normalises, norm != papers, norm, settings

        order = sorted(kinds, key=place)
        names = [_arm_name(kinds[kind][0], kind[1], [k for _, k in order]) for kind in order]
        first = int(bool(order) and kinds[order[0]][0].normalisation.normalises)
        return [
            Arm(name, kind[0], i, sorted(kinds[kind], key=lambda run: run.seed))
            for i, (kind, name) in enumerate(zip(order, names, strict=True), first)
        ]


def measure(runs: Sequence[Run]) -> Measure:
    """Return the measure of the task that the runs are of."""
    return config_class(runs[0].config).measure(runs[0].settings)


def _arm_settings(run: Run) -> Settings:
    """Settings that define an arm; those of the normaliser are ignored for a baseline."""
    own = _NORMALISER if run.normalisation.normalises else ()
    return _key(run) + tuple((k, str(run.settings[k])) for k in own if k in run.settings)


def _arm_name(run: Run, settings: Settings, every: Sequence[Settings]) -> str:
    """Name an arm by its norm and the settings in which another arm differs."""
    others = [dict(one) for one in every]
    own = {"model.gamma": str(run.normalisation.gamma)}
    differs = [
        f"{name} {own.get(name, value) if value == 'None' else value}"
        for name, value in settings
        if any(name in other and other[name] != value for other in others)
    ]
    return f"{run.norm} ({', '.join(_shortened(differs))})" if differs else run.norm


def _shortened(settings: Sequence[str]) -> list[str]:
    """Drop the prefixes of settings unless two then have the same name."""
    short = [re.sub(r"^(?:[a-z_]+\.)+", "", setting) for setting in settings]
    names = [setting.split()[0] for setting in short]
    return short if len(set(names)) == len(names) else list(settings)


def furthest(runs: Sequence[Run]) -> list[Run]:
    """Of runs with the same settings and seed, keep the one with most updates."""
    kept: dict[tuple[object, ...], Run] = {}
    for run in runs:
        other = kept.get(_identity(run))
        if other is None or (run.updates, str(run.path)) > (other.updates, str(other.path)):
            kept[_identity(run)] = run
    return list(kept.values())


def without_repeats(found: Sequence[RunOrProblem]) -> list[RunOrProblem]:
    """Keep the furthest of runs with the same settings and seed; report the others."""
    kept = {_identity(run): run for run in furthest([one.run for one in found if one.run])}
    result = []
    for one in found:
        same = kept[_identity(one.run)] if one.run is not None else None
        if same is not None and same is not one.run:
            why = f"is left out: {same.path.name} is the same run ({same.label}) and got as far"
            result.append(RunOrProblem(one.path, None, why))
        else:
            result.append(one)
    return result


def _identity(run: Run) -> tuple[object, ...]:
    return (run.recipe, run.norm, run.seed, _arm_settings(run))


def groups(runs: Sequence[Run]) -> list[Group]:
    """Group comparable runs, in the order of the first of each.

    Runs of one recipe that differ only in normalisation and seed are comparable. A normalised
    network without a baseline of its settings was tuned separately: it is grouped with the
    baselines of the recipe on the same data that have no normalised network, or else with the only
    baseline.
    """
    found: dict[tuple[str, Settings], list[Run]] = {}
    for run in runs:
        found.setdefault((run.recipe, _key(run)), []).append(run)
    result = []
    for (name, key), members in _joined(found).items():
        others = [set(k) for n, k in found if n == name]
        special = set(key) - set.intersection(*others)
        words = [f"{k} {v}" for k, v in _unusual(name, sorted(special)) if k != _DATA]
        if any(k == _DATA for k, _ in special):
            words.append(f"data {_data_words(members[0], runs)}")
        result.append(Group(name, ", ".join(words), members))
    return result


def _unusual(name: str, special: Settings | list[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Return the settings that differ from the recipe's; all of them if none does."""
    defaults = flat(to_dict(recipe(name))) if name in RECIPES else {}
    unusual = [(k, v) for k, v in special if k not in defaults or str(defaults[k]) != v]
    return unusual or special


def _joined(found: dict[tuple[str, Settings], list[Run]]) -> dict[tuple[str, Settings], list[Run]]:
    """Join networks without a baseline of their settings to one that was tuned separately."""
    kinds: dict[tuple[str, Settings], dict[frozenset[bool], list[tuple[str, Settings]]]] = {}
    for (name, key), members in found.items():
        sides = frozenset(run.normalisation.normalises for run in members)
        measured = tuple(pair for pair in key if pair[0].startswith(MEASURED))
        where = kinds.setdefault((name, measured), {})
        where.setdefault(sides, []).append((name, key))
    result = dict(found)
    for where in kinds.values():
        baselines, normalised, both = (where.get(frozenset(x), []) for x in _SIDES)
        beside = baselines or (both if len(both) == 1 else [])
        if not beside or not normalised:
            continue
        first, *rest = (kind for kind in found if kind in [*beside, *normalised])
        shared = set(first[1]).intersection(*(key for _, key in rest))
        members = [run for kind in (first, *rest) for run in found[kind]]
        place = {first: (first[0], tuple(s for s in first[1] if s in shared))}
        result = {place.get(k, k): v for k, v in result.items() if k not in rest}
        if baselines and both:  # after the pairs of a sweep
            del result[place[first]]
        result[place[first]] = members
    return result


def _key(run: Run) -> Settings:
    left_out = (*_APART, *_HARMLESS, *_NORMALISER)
    return tuple(
        (name, str(value)) for name, value in sorted(run.settings.items()) if name not in left_out
    )


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the settings besides norm and seed in which runs differ, with all values."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: [run.settings.get(name) for run in runs] for name in names}
    left_out = (*_APART, "data")  # compared by its hash
    return {
        name: found
        for name, found in values.items()
        if name not in left_out and any(value != found[0] for value in found)
    }


def data_name(run: Run) -> str:
    """Name of the data without its directory."""
    data = str(run.settings.get("data", ""))
    return data if data.startswith("builtin:") else PurePath(data).name


def _data_words(run: Run, runs: Sequence[Run]) -> str:
    """Name of the data, with part of its hash if other data has the same name."""
    name = data_name(run)
    hashes = {str(other.settings.get(_DATA, "")) for other in runs if data_name(other) == name}
    return f"{name} ({str(run.settings.get(_DATA, ''))[:8]})" if len(hashes) > 1 else name


def command(run: Run) -> str:
    """Return the command that repeats a run."""
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
