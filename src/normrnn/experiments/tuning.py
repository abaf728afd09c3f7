"""Tune one setting for every normalisation, on validation data, before the seeds are compared.

Every norm tries the same few values, each once, with a seed that the comparison does not use.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normrnn.config.base import MEASURED, Config
from normrnn.config.jsonio import flat, to_dict
from normrnn.config.registry import with_fields
from normrnn.errors import UsageError, UserError
from normrnn.experiments.jobs import RunJob
from normrnn.experiments.search.space import ANOTHER_LOSS, check
from normrnn.runs.names import CONFIG
from normrnn.runs.rows import epoch_averages

if TYPE_CHECKING:
    from normrnn.reporting.study import RecordedStudy

FOLDER = "tuning"
_NOT_TUNED = ("seed", "epochs", "norm", "recipe", "data", "data_sha256", "device", "threads")
_NOT_TUNED += ("train.epoch_tokens",)
SEED_OFFSET = 1_000_000
"""Seeds of tuning are this far from those of the comparison."""


@dataclass(frozen=True)
class Tuning:
    """What every norm tries."""

    field: str
    values: tuple[Any, ...]
    epochs: int
    full_epochs: int = 0
    """Epochs of the comparison, if that has more."""

    @property
    def each(self) -> str:
        """Epochs of each try, in words."""
        return "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"

    def refuse_untuned(self, runs: Sequence[Path], out: Path) -> None:
        """UsageError, before anything is tuned, if a run of another comparison is there."""
        from normrnn.reporting.study import read_study

        begun = [run for run in runs if (run / CONFIG).exists()]
        space = read_study(out / FOLDER).about.get("space")
        if begun and not (isinstance(space, dict) and self.field in space):
            raise UsageError(
                f"{begun[0]} was begun before {self.field} was tuned, and may not have the value"
                " that is chosen: use another --out"
            )

    def jobs(self, config: Config, norms: Sequence[str], out: Path) -> list[RunJob]:
        """Return one run per normalisation and value, in `out`/tuning/runs/NORM-VALUE."""
        seed, threads = config.seed + SEED_OFFSET, config.threads or 1
        config = replace(config, seed=seed, epochs=self.epochs, threads=threads)
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


def tuning(config: Config, norms: Sequence[str], tune: str | Mapping[str, Any]) -> Tuning:
    """Return what the user asked for: a setting, or {setting: values, "epochs": N}; UsageError if
    that cannot be tried.

    Values may be given as text. Without values a number above 0 is tried at a third, at itself and
    at three times itself.
    """
    given: dict[str, Any] = {tune: ()} if isinstance(tune, str) else dict(tune)
    epochs = given.pop("epochs", 0)
    if len(given) != 1:
        raise UsageError(f"tune names one setting, not {', '.join(given) or 'none'}")
    ((field, values),) = given.items()
    fields = flat(to_dict(config))
    if field not in fields:
        raise UsageError(f"--tune has {field}, which is not a field of {config.recipe}")
    now = fields[field]
    if field in _NOT_TUNED:
        raise UsageError(f"--tune {field}: runs that differ in it are not better or worse settings")
    if field.startswith(MEASURED):
        raise UsageError(f"--tune {field}: {ANOTHER_LOSS}")
    if epochs < 0:
        raise UsageError(f"--tune-epochs must be at least 0, not {epochs}")
    if values:
        kind = float if now is None else type(now)  # a field without a value takes numbers
        tried = tuple(_read(field, value, kind) for value in values)
    elif type(now) is float and now > 0:
        tried = tuple(float(f"{now * factor:.3g}") for factor in (1 / 3, 1, 3))
    else:
        raise UsageError(f"--tune {field} needs --tune-values, as in --tune-values {now},…")
    if len(set(tried)) < 2:
        raise UsageError(f"--tune-values needs at least 2 values, not {len(set(tried))}")
    check({field: list(tried)}, config, norms)
    longer = config.epochs if 0 < epochs < config.epochs else 0
    return Tuning(field, tuple(dict.fromkeys(tried)), epochs or config.epochs, longer)


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


def tune_setting(
    wanted: Tuning,
    config: Config,
    norms: Sequence[str],
    out: Path,
    train: Callable[[Sequence[RunJob]], None],
    say: Callable[[str], None],
) -> tuple[dict[str, Any], "RecordedStudy"]:
    """Return the best value of each norm, and all that was tried, also written as a study."""
    from normrnn.reporting.study import SAID, RecordedStudy, write
    from normrnn.reporting.trials import best

    jobs = wanted.jobs(config, norms, out)
    say(f"tuning {wanted.field}: {len(jobs)} runs of {wanted.each}")
    train(jobs)
    trials = [_trial(i, wanted, value, jobs) for i, value in enumerate(wanted.values)]
    settings = to_dict(jobs[0].config)
    about = {"study": FOLDER, "trials": len(trials), "norms": norms, "sampler": "grid"}
    about |= {"pruner": "none", "space": {wanted.field: list(wanted.values)}}
    about["config"] = {k: v for k, v in settings.items() if k not in ("data", "norm", "device")}
    study = RecordedStudy(out / FOLDER, trials, about)
    tops = {norm: best(trials, norm) for norm in norms}
    chosen = {norm: top["settings"][wanted.field] for norm, top in tops.items() if top}
    if len(chosen) == len(norms):
        about[SAID] = summarise(wanted, chosen, trials)
    write(study)
    for norm in norms:
        if norm not in chosen:
            text = f"no value of {wanted.field} trained with norm {norm}: see {study.path}"
            raise UserError(text)
    say(study.said)
    return chosen, study


def _trial(number: int, wanted: Tuning, value: Any, jobs: Sequence[RunJob]) -> dict[str, Any]:
    with_value = [job for job in jobs if flat(to_dict(job.config))[wanted.field] == value]
    results = {job.config.norm: _result(job) for job in with_value}
    good = [found["loss"] for found in results.values() if not found["diverged"]]
    return {
        "trial": number,
        "state": "complete",
        "value": min(good, default=None),
        "settings": {wanted.field: value},
        "arms": results,
    }


def _result(job: RunJob) -> dict[str, Any]:
    from normrnn.reporting.runs import load

    run = load(job.out)
    row = run.best()
    spent = {"updates": run.updates, "seconds": run.seconds}
    if job.code or row is None:
        return {"diverged": True, "loss": None, "reason": job.last_words(), **spent}
    train = epoch_averages(run.rows)[-1]["loss"]
    return {"diverged": False, "loss": row["loss"], "train": train, **spent}


def summarise(wanted: Tuning, chosen: dict[str, Any], trials: Sequence[dict[str, Any]]) -> str:
    """Return in words what was tried, what that cost, and what was chosen."""
    results = [found for trial in trials for found in trial["arms"].values()]
    updates, seconds = (sum(r.get(key, 0) for r in results) for key in ("updates", "seconds"))
    values = ", ".join(f"{v:g}" if type(v) is float else str(v) for v in wanted.values)
    numbers = all(type(value) in (int, float) for value in wanted.values)
    ends = (min(wanted.values), max(wanted.values)) if numbers else ()
    picked = ", ".join(
        f"{norm} {value}{' (at the edge of what was tried)' if value in ends else ''}"
        for norm, value in chosen.items()
    )
    text = (
        f"{wanted.field} was tuned for each norm on validation data: values {values}; one seed"
        f" that is not compared, {wanted.each}, {len(results)} runs, {updates:,} updates,"
        f" {seconds:,.0f} seconds in updates. Chosen: {picked}."
    )
    if wanted.full_epochs:
        text += (
            f" Chosen after {wanted.epochs} of {wanted.full_epochs} epochs: a value that leads"
            " early, as a high learning rate often does, may not lead at the end."
        )
    return text
