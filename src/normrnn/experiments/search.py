"""Trials: every normalisation trained with each of several settings.

`normrnn search` draws the settings from a space, `tune=` of a comparison tries a few values of one
setting. Settings follow from the seed, the number of the trial and the results before it, so all
commands that share a directory draw the same ones; the locks of the run directories divide the
work.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normrnn.config.base import Config
from normrnn.config.jsonio import differences, flat, to_dict
from normrnn.config.registry import with_fields
from normrnn.errors import UsageError, UserError
from normrnn.experiments.jobs import RunJob, Runner, plan
from normrnn.experiments.space import Space, check_space, draw, grid, optuna_module
from normrnn.runs.records import CONFIG, epoch_averages

if TYPE_CHECKING:
    from normrnn.reporting.study import RecordedStudy

TUNING, CONFIRM = "tuning", "confirm"
SEED_OFFSET = 1_000_000
"""Seeds of tuning are this far from those of the comparison."""
_NOT_SHARED = ("data", "device", "threads", "norm")
"""Settings that commands which share a study may differ in."""
_ROUND = 4
"""Trials that the sampler tpe draws at a time, all from the results of the rounds before."""


@dataclass
class Trial:
    """One setting, and its runs, one per normalisation."""

    number: int
    setting: dict[str, Any]
    jobs: list[RunJob]

    def row(self) -> dict[str, Any]:
        """Return the row of trials.jsonl."""
        results = {job.config.norm: _result(job) for job in self.jobs}
        good = [found["loss"] for found in results.values() if not found["diverged"]]
        return {
            "trial": self.number,
            "state": "complete",
            "value": min(good, default=None),
            "settings": self.setting,
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


def _rows(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Return the rows of the trials whose runs have all ended."""
    return [trial.row() for trial in trials if all(job.has_ended for job in trial.jobs)]


def search(
    config: Config,
    space: Space,
    norms: Sequence[str],
    out: Path,
    trials: int,
    sampler: str = "random",
    workers: int = 1,
    processes: int = 1,
    confirm: int = 0,
) -> None:
    """Run a study to its end, or join the commands that run it, and write its report."""
    from normrnn.reporting.study import RecordedStudy, lines, write

    optuna_module()
    every = grid(space, config) if sampler == "bruteforce" else []
    runner = Runner(config, workers, processes)
    config = replace(runner.data.completed(config), threads=config.threads or 1)
    study = _open_study(config, space, norms, sampler, out)
    count = study.about["trials"] = max(min(trials, len(every) or trials), len(study.trials))
    write(study)
    drawn: list[Trial] = []
    rows: list[dict[str, Any]] = []
    try:
        while len(drawn) < count:
            size = min(count - len(drawn), _ROUND if sampler == "tpe" else count)
            for number in range(len(drawn), len(drawn) + size):
                setting = every[number] if every else draw(space, config, sampler, number, rows)
                drawn.append(_trial(number, setting, config, norms, out))
            runner.train([job for trial in drawn for job in trial.jobs])
            rows = _rows(drawn)
    finally:
        study = RecordedStudy(out, _rows(drawn) or study.trials, study.about)
        write(study)
        if study.trials:
            runner.say("\n".join(lines(study.trials)))
            _report(study, runner)
        runner.say(f"{len(study.trials)} of {count} trials are done")
    if confirm:
        _confirm(study, config, norms, confirm, runner)
        _report(study, runner)


def _trial(
    number: int, setting: dict[str, Any], config: Config, norms: Sequence[str], out: Path
) -> Trial:
    jobs = [
        RunJob(
            out / "trials" / f"{number:04d}" / norm,
            with_fields(config, {**setting, "norm": norm}),
            label=f"{norm}, trial {number}",
        )
        for norm in norms
    ]
    return Trial(number, setting, jobs)


def _open_study(
    config: Config, space: Space, norms: Sequence[str], sampler: str, out: Path
) -> "RecordedStudy":
    """Return the study in `out`, or a new one; UsageError if another one is there."""
    from normrnn.reporting.study import TRIALS, RecordedStudy, read_study

    settings = {k: v for k, v in to_dict(config).items() if k not in _NOT_SHARED}
    about = {"study": config.recipe, "norms": list(norms), "sampler": sampler, "space": space}
    about = json.loads(json.dumps({**about, "config": settings}))
    study = read_study(out)
    if study.problem and (out / TRIALS).exists():
        raise UserError(f"{study.problem}: remove that, or use another --out")
    if study.about:
        before = {name: value for name, value in study.about.items() if name != "trials"}
        changed = differences(before, about)
        first = changed.get("config.recipe") or ", ".join(changed.values())
        if first:
            raise UsageError(
                f"{out} holds a study with other settings ({first}): use another --out"
            )
    return RecordedStudy(out, study.trials, about)


def _report(study: "RecordedStudy", runner: Runner) -> None:
    from normrnn.reporting.pictures import why_no_pictures
    from normrnn.reporting.result import Result
    from normrnn.reporting.runs import find

    runs = [*study.runs(), *sorted((study.path / CONFIRM).glob("*"))]
    report = study.path / "report.html"
    Result(*find(runs), f"normrnn search {study.recipe}", [study]).save(report)
    omitted = why_no_pictures()
    runner.say(f"report: {report}{f' ({omitted})' if omitted else ''}")


def _confirm(
    study: "RecordedStudy", config: Config, norms: Sequence[str], seeds: int, runner: Runner
) -> None:
    """Train the best setting of each variant with fresh seeds, and print the verdict on them."""
    from normrnn.reporting.groups import Group
    from normrnn.reporting.result import group_verdict
    from normrnn.reporting.runs import load
    from normrnn.reporting.study import best

    jobs: list[RunJob] = []
    for norm in norms:
        top = best(study.trials, norm)
        if top is None:
            raise UserError(f"nothing to confirm: no setting trained with norm {norm}")
        chosen = replace(with_fields(config, top["settings"]), seed=config.seed + 1)
        jobs += plan(chosen, (norm,), seeds, study.path / CONFIRM)
    runner.say(f"confirming with {seeds} fresh seeds: {len(jobs)} runs")
    runner.train(jobs)
    runner.say(str(group_verdict(Group(config.recipe, "", [load(job.out) for job in jobs]))))


@dataclass(frozen=True)
class Tuning:
    """The values of one setting that every norm tries, each once, with a seed of its own."""

    field: str
    values: tuple[Any, ...]
    epochs: int
    full_epochs: int = 0
    """Epochs of the comparison, if that has more."""

    @property
    def each(self) -> str:
        """Epochs of each try, in words."""
        return "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"

    def trials(self, config: Config, norms: Sequence[str], out: Path) -> list[Trial]:
        """Return a trial per value, its runs in `out`/tuning/runs/NORM-VALUE."""
        seed, threads = config.seed + SEED_OFFSET, config.threads or 1
        config = replace(config, seed=seed, epochs=self.epochs, threads=threads)
        name = self.field.rpartition(".")[2]
        return [
            Trial(
                number,
                {self.field: value},
                [
                    RunJob(
                        out / TUNING / "runs" / f"{norm}-{value}",
                        with_fields(config, {self.field: value, "norm": norm}),
                        label=f"{norm}, {name} {value}",
                    )
                    for norm in norms
                ],
            )
            for number, value in enumerate(self.values)
        ]


def plan_tuning(config: Config, norms: Sequence[str], tune: str | Mapping[str, Any]) -> Tuning:
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
    if epochs < 0:
        raise UsageError(f"--tune-epochs must be at least 0, not {epochs}")
    now = flat(to_dict(config)).get(field)
    if values:
        kind = float if now is None else type(now)  # a field without a value takes numbers
        tried = [_read(field, value, kind) for value in values]
    elif type(now) is float and now > 0:
        tried = [float(f"{now * factor:.3g}") for factor in (1 / 3, 1, 3)]
    else:
        tried = [now]
    check_space({field: tried}, config, norms)
    if len(set(tried)) < 2:
        raise UsageError(f"--tune {field} needs --tune-values with at least 2 values: {now},…")
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
    tuning: Tuning,
    config: Config,
    norms: Sequence[str],
    out: Path,
    compared: Sequence[RunJob],
    runner: Runner,
) -> tuple[dict[str, Any], "RecordedStudy"]:
    """Return the best value of each norm, and all that was tried, also written as a study.

    UsageError, before anything is tuned, if a run to compare was begun without this tuning.
    """
    from normrnn.reporting.study import SAID, RecordedStudy, best, read_study, write

    begun = [job.out for job in compared if (job.out / CONFIG).exists()]
    space = read_study(out / TUNING).about.get("space")
    if begun and not (isinstance(space, dict) and tuning.field in space):
        raise UsageError(
            f"{begun[0]} was begun before {tuning.field} was tuned, and may not have the value"
            " that is chosen: use another --out"
        )
    trials = tuning.trials(config, norms, out)
    jobs = [job for trial in trials for job in trial.jobs]
    runner.say(f"tuning {tuning.field}: {len(jobs)} runs of {tuning.each}")
    runner.train(jobs)
    rows, settings = _rows(trials), to_dict(jobs[0].config)
    about = {"study": TUNING, "trials": len(trials), "norms": norms, "sampler": "grid"}
    about |= {"space": {tuning.field: list(tuning.values)}}
    about["config"] = {k: v for k, v in settings.items() if k not in ("data", "norm", "device")}
    study = RecordedStudy(out / TUNING, rows, about)
    tops = {norm: best(rows, norm) for norm in norms}
    chosen = {norm: top["settings"][tuning.field] for norm, top in tops.items() if top}
    if len(chosen) == len(norms):
        about[SAID] = summarise(tuning, chosen, rows)
    write(study)
    for norm in norms:
        if norm not in chosen:
            text = f"no value of {tuning.field} trained with norm {norm}: see {study.path}"
            raise UserError(text)
    runner.say(study.said)
    return chosen, study


def summarise(tuning: Tuning, chosen: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return in words what was tried, what that cost, and what was chosen."""
    results = [found for row in rows for found in row["arms"].values()]
    updates, seconds = (sum(r.get(key, 0) for r in results) for key in ("updates", "seconds"))
    values = ", ".join(f"{v:g}" if type(v) is float else str(v) for v in tuning.values)
    numbers = all(type(value) in (int, float) for value in tuning.values)
    ends = (min(tuning.values), max(tuning.values)) if numbers else ()
    picked = ", ".join(
        f"{norm} {value}{' (at the edge of what was tried)' if value in ends else ''}"
        for norm, value in chosen.items()
    )
    text = (
        f"{tuning.field} was tuned for each norm on validation data: values {values}; one seed"
        f" that is not compared, {tuning.each}, {len(results)} runs, {updates:,} updates,"
        f" {seconds:,.0f} seconds in updates. Chosen: {picked}."
    )
    if tuning.full_epochs:
        text += (
            f" Chosen after {tuning.epochs} of {tuning.full_epochs} epochs: a value that leads"
            " early, as a high learning rate often does, may not lead at the end."
        )
    return text
