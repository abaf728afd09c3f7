"""Each arm at its own best: one field is tuned for every arm, on validation, before the seeds run.

The same few values for every arm, each trained once with a seed that the comparison does not use.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normrnn.config.base import MEASURED, Config
from normrnn.config.jsonio import flat, to_dict
from normrnn.config.registry import with_fields
from normrnn.errors import UsageError, UserError
from normrnn.experiments.jobs import RunJob
from normrnn.experiments.search.space import ANOTHER_LOSS, check
from normrnn.runs.rows import epoch_averages

if TYPE_CHECKING:
    from normrnn.reporting.study import RecordedStudy

FOLDER = "tuning"
_NOT_TUNED = ("seed", "epochs", "norm", "recipe", "data", "data_sha256", "device", "threads")
_NOT_TUNED += ("train.epoch_tokens",)
APART = 1_000_000
"""Seeds of tuning are this far from those of the comparison."""


@dataclass(frozen=True)
class Tuning:
    """What is tried for every arm."""

    field: str
    values: tuple[Any, ...]
    epochs: int
    of: int = 0
    """Epochs of the comparison, if that has more."""

    def recorded(self, out: Path) -> bool:
        """Whether this field was tuned there before."""
        from normrnn.reporting.study import read_study

        space = read_study(out / FOLDER).about.get("space")
        return isinstance(space, dict) and self.field in space

    def jobs(self, config: Config, norms: Sequence[str], out: Path) -> list[RunJob]:
        """One run per normalisation and value, in `out`/tuning/runs/NORM-VALUE."""
        config = replace(
            config, seed=config.seed + APART, epochs=self.epochs, threads=config.threads or 1
        )
        return [
            RunJob(
                out / FOLDER / "runs" / f"{norm}-{value}",
                with_fields(config, {self.field: value, "norm": norm}),
                may_diverge=True,
                setting=f"{self.field.rpartition('.')[2]} {value}",
            )
            for value in self.values
            for norm in norms
        ]


def tuning(
    config: Config, norms: Sequence[str], field: str, values: Sequence[Any], epochs: int
) -> Tuning:
    """Return what the user asked for; UsageError if that cannot be tried.

    Values may be given as text. Without values a number above 0 is tried at a third, at itself and
    at three times itself.
    """
    fields = flat(to_dict(config))
    if field not in fields:
        raise UsageError(f"--tune has {field}, which is no field of {config.recipe}")
    now = fields[field]
    if field in _NOT_TUNED:
        raise UsageError(f"--tune {field}: it tells runs apart, or how long they are, not better")
    if field.startswith(MEASURED):
        raise UsageError(f"--tune {field}: {ANOTHER_LOSS}")
    if epochs < 0:
        raise UsageError(f"--tune-epochs must be at least 0, not {epochs}")
    if values:
        kind = float if now is None else type(now)  # what has no value yet is a number, or nothing
        tried = tuple(_read(field, value, kind) for value in values)
    elif type(now) is float and now > 0:
        tried = tuple(float(f"{now * factor:.3g}") for factor in (1 / 3, 1, 3))
    else:
        raise UsageError(f"--tune {field} needs --tune-values, as in --tune-values {now},…")
    if len(set(tried)) < 2:
        raise UsageError(f"--tune-values has {len(set(tried))} value: there is nothing to choose")
    check({field: list(tried)}, config, norms)
    shorter = config.epochs if 0 < epochs < config.epochs else 0
    return Tuning(field, tuple(dict.fromkeys(tried)), epochs or config.epochs, shorter)


def _read(field: str, given: Any, kind: type) -> Any:
    try:
        is_text = isinstance(given, str) and kind is not str
        value = json.loads(given) if is_text else given
    except ValueError:
        value = None
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise UsageError(f"--tune-values has {given!r}, no value for {field}")
    return value


def tuned(
    wanted: Tuning, arms: Sequence[RunJob], train: Callable[[Sequence[RunJob]], None], out: Path
) -> tuple[dict[str, Any], "RecordedStudy"]:
    """The best value of each normalisation, and all that was tried, also written as a study."""
    from normrnn.reporting.study import SAID, RecordedStudy, write
    from normrnn.reporting.trials import best

    train(arms)
    norms = list(dict.fromkeys(arm.config.norm for arm in arms))
    trials = [_trial(i, wanted, value, arms) for i, value in enumerate(wanted.values)]
    config = to_dict(arms[0].config)
    about = {"study": FOLDER, "trials": len(trials), "norms": norms, "sampler": "grid"}
    about |= {"pruner": "none", "space": {wanted.field: list(wanted.values)}}
    about["config"] = {k: v for k, v in config.items() if k not in ("data", "norm", "device")}
    study = RecordedStudy(out / FOLDER, trials, about)
    tops = {norm: best(trials, norm) for norm in norms}
    chosen = {norm: top["settings"][wanted.field] for norm, top in tops.items() if top}
    if len(chosen) == len(norms):
        about[SAID] = sentence(wanted, chosen, study)
    write(study)
    for norm in norms:
        if norm not in chosen:
            raise UserError(
                f"no value of {wanted.field} trained with norm {norm}: see {study.path}"
            )
    return chosen, study


def _trial(number: int, wanted: Tuning, value: Any, arms: Sequence[RunJob]) -> dict[str, Any]:
    settings = {wanted.field: value}
    results = {
        arm.config.norm: _result(arm)
        for arm in arms
        if flat(to_dict(arm.config))[wanted.field] == value
    }
    good = [found["loss"] for found in results.values() if not found["diverged"]]
    trial = {"trial": number, "state": "complete", "value": min(good, default=None)}
    return {**trial, "settings": settings, "arms": results}


def _result(arm: RunJob) -> dict[str, Any]:
    from normrnn.reporting.runs import load

    run = load(arm.out)
    row = run.best()
    spent = {"updates": run.updates, "seconds": run.seconds}
    if arm.code or row is None:
        return {"diverged": True, "loss": None, "reason": arm.last_words(), **spent}
    result = {"diverged": False, "loss": row["loss"], "train": epoch_averages(run.rows)[-1]["loss"]}
    return result | spent


def sentence(wanted: Tuning, chosen: dict[str, Any], study: "RecordedStudy") -> str:
    """What was tuned, what that cost, and what came out."""
    results = [found for trial in study.trials for found in trial["arms"].values()]
    spent = [sum(found.get(key, 0) for found in results) for key in ("updates", "seconds")]
    budget = (
        f"{wanted.field} was tuned for each arm on validation: {len(wanted.values)} values"
        f" ({', '.join(f'{v:g}' if type(v) is float else str(v) for v in wanted.values)}), one seed"
        f" that is not compared, {_epochs(wanted.epochs)}, {len(results)} runs, {spent[0]:,}"
        f" updates, {spent[1]:,.0f} seconds in updates."
    )
    numbers = all(type(value) in (int, float) for value in wanted.values)
    ends = (min(wanted.values), max(wanted.values)) if numbers else ()
    picked = [
        f"{norm} {value}{' (at the edge of what was tried)' if value in ends else ''}"
        for norm, value in chosen.items()
    ]
    early = (
        f" Chosen after {wanted.epochs} of {wanted.of} epochs: what is ahead early, as a high"
        " learning rate often is, need not be in the end."
    )
    return f"{budget} Chosen: {', '.join(picked)}.{early if wanted.of else ''}"


def _epochs(n: int) -> str:
    return "1 epoch" if n == 1 else f"{n} epochs"
