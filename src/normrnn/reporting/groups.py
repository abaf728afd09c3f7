"""Groups of comparable runs: those that differ only in normalisation and seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from normrnn.config.base import SHOWN, Measure
from normrnn.config.jsonio import flat, to_dict
from normrnn.config.registry import config_class
from normrnn.errors import notice
from normrnn.recipes import PAPER, RECIPES, recipe
from normrnn.reporting.runs import Run

_NAMES = "gamma eps momentum time_steps cell_norm count_padding shrinkage freeze_after"
_NORMALISER = [f"model.{name}" for name in _NAMES.split()]
"""Settings that distinguish arms only with a normaliser."""
_IGNORED = ["threads", "device", "data", "epochs", "train.log_every", "train.checkpoint_every"]
_IGNORED += ["norm", "seed", "code_sha256", "shared_initialisation"]
_IGNORED += [f"shown.{name}" for name in SHOWN]
"""Settings that change no curve, or that arms have in the place of a name."""
Settings = tuple[tuple[str, str], ...]
Key = tuple[str, Settings]  # recipe and settings


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
        """Recipe and variant."""
        return f"{self.recipe}, {self.variant}" if self.variant else self.recipe

    @property
    def measure(self) -> Measure:
        """The measure of the task."""
        return self.runs[0].measure

    @property
    def arms(self) -> list[Arm]:
        """Arms named by their differing settings: baseline, the paper's normalisation, others."""
        kinds: dict[tuple[str, Settings], list[Run]] = {}
        for run in self.runs:
            kinds.setdefault((run.norm, _arm_settings(run)), []).append(run)
        papers = PAPER[self.recipe].norm if self.recipe in PAPER else ""

        def sort_key(kind: tuple[str, Settings]) -> tuple[object, ...]:
            norm, settings = kind
            return kinds[kind][0].normalisation.normalises, norm != papers, norm, settings

        order = sorted(kinds, key=sort_key)
        names = [_arm_name(kinds[kind][0], kind[1], [k for _, k in order]) for kind in order]
        first = int(bool(order) and kinds[order[0]][0].normalisation.normalises)
        return [
            Arm(name, kind[0], i, sorted(kinds[kind], key=lambda run: run.seed))
            for i, (kind, name) in enumerate(zip(order, names, strict=True), first)
        ]


def groups(runs: Sequence[Run]) -> list[Group]:
    """Group comparable runs, in the order of the first of each.

    Runs of one recipe that differ only in normalisation and seed are comparable. A normalised
    network without a baseline of its settings was tuned separately: it is grouped with the
    baselines of the recipe on the same data that have no normalised network, or else with the only
    baseline. Of runs with the same settings and seed, the one with most updates counts.
    """
    runs = _drop_duplicates(runs)
    found: dict[Key, list[Run]] = {}
    for run in runs:
        found.setdefault((run.recipe, _settings(run)), []).append(run)
    result = []
    for keys in _comparable(found):
        name, members = keys[0][0], [run for key in keys for run in found[key]]
        shared = set.intersection(*(set(settings) for _, settings in keys))
        common = set.intersection(*(set(settings) for other, settings in found if other == name))
        special = sorted(shared - common)
        data = dict(special).get("data_sha256")
        words = [f"{k} {v}" for k, v in _non_default(name, special) if k != "data_sha256"]
        words += [f"data {data_name(members[0])} ({data[:8]})"] if data else []
        result.append(Group(name, ", ".join(words), members))
    return result


def _drop_duplicates(runs: Sequence[Run]) -> list[Run]:
    """Of runs with the same settings and seed, keep the one with most updates; report the rest."""
    kept: dict[object, Run] = {}
    for run in sorted(runs, key=lambda run: (run.updates, str(run.path))):
        identity = run.recipe, run.norm, run.seed, _arm_settings(run)
        if identity in kept:
            path = kept[identity].path
            notice(f"{path} is left out: {run.path.name} is the same run and got as far")
        kept[identity] = run
    return [run for run in runs if any(run is one for one in kept.values())]


def _comparable(found: dict[Key, list[Run]]) -> list[list[Key]]:
    """Return the settings that are compared, separately tuned ones together."""
    families: dict[Key, list[Key]] = {}
    for (name, settings), runs in found.items():
        fields = config_class(runs[0].config).measured
        measured = tuple(pair for pair in settings if pair[0].startswith(fields))
        families.setdefault((name, measured), []).append((name, settings))
    parts = []
    for keys in families.values():
        sides = {key: {run.normalisation.normalises for run in found[key]} for key in keys}
        baselines, normalised, both = (
            [key for key in keys if sides[key] == side] for side in ({False}, {True}, {False, True})
        )
        beside = baselines or (both if len(both) == 1 else [])
        tuned = [*beside, *normalised] if beside and normalised else []
        parts += [[key for key in keys if key in tuned]] if tuned else []
        parts += [[key] for key in keys if key not in tuned]
    order = list(found)
    return sorted(parts, key=lambda keys: order.index(keys[0]))


def _settings(run: Run) -> Settings:
    """Settings that define an experiment."""
    settings = [(k, str(v)) for k, v in run.settings.items() if k not in _IGNORED + _NORMALISER]
    return tuple(sorted(pair for pair in settings if not pair[0].startswith("evaluation.train_")))


def _arm_settings(run: Run) -> Settings:
    """Settings that define an arm; those of the normaliser are ignored for a baseline."""
    own = _NORMALISER if run.normalisation.normalises else ()
    return _settings(run) + tuple((k, str(run.settings[k])) for k in own if k in run.settings)


def _arm_name(run: Run, settings: Settings, every: Sequence[Settings]) -> str:
    """Name an arm by its norm and the settings in which another arm differs."""
    others, own = [dict(one) for one in every], {"model.gamma": str(run.normalisation.gamma)}
    differs = {
        name: own.get(name, value) if value == "None" else value
        for name, value in settings
        if any(name in other and other[name] != value for other in others)
    }
    words = [f"{k} {v}" for k, v in zip(short(list(differs)), differs.values(), strict=True)]
    return f"{run.norm} ({', '.join(words)})" if words else run.norm


def short(names: Sequence[str]) -> list[str]:
    """Drop the prefixes of fields where that is unambiguous.

    >>> short(["optimizer.lr", "optimizer.momentum", "model.momentum"])
    ['lr', 'optimizer.momentum', 'model.momentum']
    """
    last = [name.split(".")[-1] for name in names]
    return [name if last.count(end) > 1 else end for name, end in zip(names, last, strict=True)]


def _non_default(name: str, special: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Return the settings that differ from the recipe's; all of them if none does."""
    defaults = flat(to_dict(recipe(name))) if name in RECIPES else {}
    unusual = [(k, v) for k, v in special if k not in defaults or str(defaults[k]) != v]
    return unusual or special


def data_name(run: Run) -> str:
    """Name of the data without its directory."""
    return PurePath(str(run.settings.get("data", ""))).name
