"""`normrnn compare RECIPE`."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.table import Table
from tyro.conf import arg

from normrnn.commands.jobs import Job, Jobs, plan
from normrnn.commands.options import parse, split_recipe, without_norm
from normrnn.commands.tuning import Tuning, tuned, tuning
from normrnn.config.base import Config, checked_norms
from normrnn.config.jsonio import to_dict
from normrnn.console import PlainConsole
from normrnn.engine.launch import DIVERGED
from normrnn.errors import UsageError
from normrnn.files import refuse_stream
from normrnn.processes import usable_cores
from normrnn.recipes import read_config, usual_norms
from normrnn.recipes import recipe as named
from normrnn.runs.names import CONFIG, METRICS
from normrnn.runs.note import read_note
from normrnn.runs.rows import Row, read_rows
from normrnn.search.space import with_fields

if TYPE_CHECKING:
    from normrnn.engine.task import Task
    from normrnn.reporting.result import Result
    from normrnn.reporting.study import RecordedStudy


@dataclass(frozen=True)
class Request:
    """What to compare, besides the experiment itself."""

    norms: tuple[str, ...]
    seeds: int
    jobs: int
    out: Path
    tensorboard: bool
    target: float | None
    tuning: Tuning | None
    processes: int = 1


def run(arguments: list[str]) -> int:
    """Train a recipe with several normalisations and compare them."""
    default, rest = split_recipe("compare", arguments)
    without = without_norm(default)

    def options(
        config: Annotated[Config, arg(name="")] = without,
        norms: str = ",".join(usual_norms(default.recipe)),
        seeds: int = 1,
        jobs: int = 0,
        processes: int = 1,
        out: Annotated[Path | None, arg(metavar="DIR")] = None,
        tensorboard: bool = False,
        target: float | None = None,
        tune: Annotated[str, arg(metavar="FIELD")] = "",
        tune_values: Annotated[str, arg(metavar="V,V,...")] = "",
        tune_epochs: int = 0,
    ) -> tuple[Config, dict[str, Any]]:
        """Train every normalisation with every seed, in processes of their own, and compare them.

        Args:
            config: The experiment; 0 threads are 1 per process.
            norms: Normalisations to compare, comma-separated; none is the baseline.
            seeds: How many seeds, from --seed on.
            jobs: Runs at a time; 0 for as many as there are cores to use.
            processes: Of each run, which train it together; its batch is shared among them.
            out: Holds one run directory per run, and report.html; runs/RECIPE unless given.
            tensorboard: Also write the rows for tensorboard, in the run directories.
            target: A validation value to reach (perplexity, nats, FCE), instead of one that
                every run reaches.
            tune: A field to tune for each arm, on validation, before the seeds run, as in
                optimizer.lr; without it all arms have the same settings.
            tune_values: What to try; a third of it, itself and three times itself unless given.
            tune_epochs: Epochs of each try; 0 for those of the experiment.
        """
        given = {"norms": norms, "seeds": seeds, "jobs": jobs, "out": out}
        given |= {"tensorboard": tensorboard, "target": target, "processes": processes}
        return config, {**given, "tune": tune, "values": tune_values, "epochs": tune_epochs}

    parsed, given = parse(options, f"compare {default.recipe}", rest)
    config = read_config(to_dict(parsed))
    _compare(config, _request(config, **given))
    return 0


def _request(
    config: Config, *, tune: str, values: str, epochs: int, out: Path | None, **given: Any
) -> Request:
    """UsageError for what cannot be done."""
    norms = checked_norms(given.pop("norms"), "--norms")
    for name, least in (("seeds", 1), ("jobs", 0), ("processes", 1)):
        if given[name] < least:
            raise UsageError(f"--{name} must be at least {least}, not {given[name]}")
    target = given["target"]
    if target is not None and not 0 < target < math.inf:
        raise UsageError(f"--target must be a number above 0, not {target}")
    if (values or epochs) and not tune:
        raise UsageError("--tune-values and --tune-epochs need --tune FIELD")
    refuse_stream(config.data)
    chosen = tuning(config, norms, tune, values, epochs) if tune else None
    place = out or Path("runs") / config.recipe
    return Request(norms=norms, out=place, tuning=chosen, **given)


def compare(
    recipe: str,
    norms: str | Sequence[str | None] | None = None,
    seeds: int = 1,
    out: str | Path | None = None,
    data: str | Path | None = None,
    jobs: int = 0,
    processes: int = 1,
    tensorboard: bool = False,
    target: float | None = None,
    tune: str = "",
    tune_values: Sequence[Any] = (),
    tune_epochs: int = 0,
    **fields: Any,
) -> "Result":
    """Do what `normrnn compare RECIPE` does, and return the runs and the verdict on them.

    `norms`, a sequence or a comma-separated string, are ("none", "frame") unless given, or the pair
    that the paper compared; None is "none". `fields` are settings of the recipe, those of a part as
    a dict: `epochs=2, model={"hidden": 64}`. The runs train in processes of their own, `processes`
    each, in `out`/NORM-SEED; calling again resumes them, or reads them if they have finished.
    `target` is a figure to reach on validation; `tune` names a field to tune for each arm before
    the seeds run, as in "optimizer.lr". `print` the result for the answer; `result.runs` are the
    runs, `result.plot()` draws them, `result.to_dict()` has the numbers.
    """
    values = to_dict(named(recipe))
    if data is not None:
        values["data"] = str(data)
    for name, value in fields.items():
        part = values.get(name)
        values[name] = {**part, **value} if isinstance(part, dict) else value
    config = read_config(values)
    request = _request(
        config,
        norms=norms or usual_norms(recipe),
        seeds=seeds,
        jobs=jobs,
        processes=processes,
        out=None if out is None else Path(out),
        tensorboard=tensorboard,
        target=target,
        tune=tune,
        values=",".join(v if isinstance(v, str) else json.dumps(v) for v in tune_values),
        epochs=tune_epochs,
    )
    return _compare(config, request)


def _compare(config: Config, request: Request) -> "Result":
    from normrnn.reporting.answer import group_verdicts
    from normrnn.reporting.groups import groups
    from normrnn.reporting.page import refuse_other, write_report
    from normrnn.reporting.pictures import why_no_pictures
    from normrnn.reporting.result import Result, Runs
    from normrnn.reporting.runs import find

    out, console, omitted = request.out, PlainConsole(), why_no_pictures()
    refuse_other(out / "report.html")
    arms = plan(config, request.norms, request.seeds, out)
    if request.tensorboard:
        from normrnn.engine.tensorboard import require_tensorboard

        require_tensorboard()
        arms = [replace(arm, options=["--tensorboard"]) for arm in arms]
    data = _open_data(replace(config, norm=request.norms[-1]))
    if omitted:  # said now, not after hours of training
        console.print(omitted, soft_wrap=True)
    console.print(f"data: {data.source}", soft_wrap=True)
    studies = []
    try:
        if request.tuning is not None:
            _refuse_untuned(arms, request.tuning, out)
            chosen, study = _tuned(config, request, request.tuning, data, console)
            arms = [_with(arm, request.tuning.field, chosen[arm.config.norm]) for arm in arms]
            studies.append(study)
        _train(arms, request, data, console)
        for arm in arms:
            if arm.state == "diverged":
                console.print(f"{arm.label} diverged: {arm.last_words()}", soft_wrap=True)
    except KeyboardInterrupt:
        stopped = f"stopped; the same command resumes from the checkpoints in {out}"
        console.print(stopped, soft_wrap=True)
        raise
    directories = find([arm.out for arm in arms])
    runs = Runs(one.run for one in directories if one.run is not None)
    verdicts = group_verdicts(groups(runs), target=request.target)
    result = Result(runs, verdicts, f"normrnn compare {config.recipe}")
    console.print(str(result), soft_wrap=True)
    write_report(directories, out / "report.html", result.title, studies, request.target)
    text_only = f" ({omitted})" if omitted else ""
    console.print(f"report: {out / 'report.html'}{text_only}", soft_wrap=True)
    return result


def _tuned(
    config: Config, request: Request, wanted: Tuning, data: "Task", console: Console
) -> "tuple[dict[str, Any], RecordedStudy]":
    arms = wanted.arms(config, request.norms, request.out)
    each = "1 epoch" if wanted.epochs == 1 else f"{wanted.epochs} epochs"
    console.print(f"tuning {wanted.field}: {len(arms)} runs of {each}")
    chosen, study = tuned(wanted, arms, lambda a: _train(a, request, data, console), request.out)
    console.print(study.said)
    return chosen, study


def _open_data(config: Config) -> "Task":
    """Open the data before any run starts, so that a wrong --data or --device fails at once."""
    from normrnn.engine.start import open_experiment
    from normrnn.runs.environment import named_device

    named_device(config.device)
    return open_experiment(config)


def _refuse_other(arms: Sequence[Job], data: "Task") -> None:
    """UsageError if a run was begun with other settings or data, before any other is trained."""
    from normrnn.engine.start import refuse_changes
    from normrnn.runs.store import RunDirectory

    for arm in arms:
        if not (arm.out / CONFIG).exists():
            continue
        old = RunDirectory(arm.out).config()
        refuse_changes(old, data.completed(arm.config), arm.out)


def _mark_ended(arms: Sequence[Job]) -> None:
    """Note the runs that have ended as asked: they are read, not started again."""
    from normrnn.reporting.runs import examine

    for arm in arms:
        if not (arm.out / CONFIG).exists():
            continue
        found = examine(arm.out)
        run, sure = found.run, found.verified and not found.problem and not found.words
        if run is None or not sure or run.training or run.config.get("epochs") != arm.config.epochs:
            continue  # the process that resumes it says what is wrong
        if "--tensorboard" in arm.options and not (arm.out / "tensorboard").is_dir():
            continue
        if run.diverged:
            arm.ended, arm.reason = DIVERGED, run.diverged
        elif (read_note(arm.out) or {}).get("finished") == arm.config.epochs:
            arm.ended = 0


def _refuse_untuned(arms: Sequence[Job], wanted: Tuning, out: Path) -> None:
    """Runs of another comparison are known before anything is tuned."""
    begun = [arm for arm in arms if (arm.out / CONFIG).exists()]
    if begun and not wanted.recorded(out):
        raise UsageError(
            f"{begun[0].out} was begun before {wanted.field} was tuned, and may not have the value"
            " that is chosen: use another --out"
        )


def _with(arm: Job, field: str, value: Any) -> Job:
    return replace(arm, config=with_fields(arm.config, {field: value}))


def _train(arms: Sequence[Job], request: Request, data: "Task", console: Console) -> None:
    for arm in arms:
        arm.config = replace(arm.config, **data.settings)
    _refuse_other(arms, data)
    _mark_ended(arms)
    if all(arm.code is not None for arm in arms):
        return
    for arm in arms:
        arm.processes = request.processes
    progress = _Progress(arms, _updates(arms[0].config.epochs, data, console))
    cores = request.processes * max(arm.config.threads for arm in arms)
    jobs = request.jobs or max(1, usable_cores() // cores)
    with _watching(arms, progress, console) as watch:
        Jobs(arms, jobs).run(watch)


def _updates(epochs: int, data: "Task", console: Console) -> int:
    """Count the updates of a run. Building its task finds data that cannot be trained on."""
    import torch

    with torch.random.fork_rng(devices=[]):
        task = data.build(torch.device("cpu"))
    if summary := getattr(task, "data_summary", ""):
        console.print(summary)
    return sum(task.updates(epoch) for epoch in range(epochs))


class _Progress:
    """How far all runs are together, and how long the rest will take."""

    def __init__(self, arms: Sequence[Job], updates: int) -> None:
        self.arms = arms
        self.updates = updates
        self.before = self._done([read_rows(arm.out / METRICS) for arm in arms])
        self.began = time.monotonic()

    def _done(self, rows: Sequence[Sequence[Row]]) -> int:
        """Updates done; an ended run has none left."""
        return sum(
            self.updates if _over(arm) else found[-1]["updates"] if found else 0
            for arm, found in zip(self.arms, rows, strict=True)
        )

    def line(self, rows: Sequence[Sequence[Row]]) -> str:
        """Return the state of the whole comparison, `rows` being those of each run."""
        from normrnn.engine.display import duration

        total, done = self.updates * len(self.arms), self._done(rows)
        ended = sum(map(_over, self.arms))
        text = f"{ended} of {len(self.arms)} runs done, {done / total:.0%} of all updates"
        if done == self.before or ended == len(self.arms):
            return text
        left = (total - done) * (time.monotonic() - self.began) / (done - self.before)
        return f"{text}, about {duration(left)} left"


def _over(arm: Job) -> bool:
    """Whether a run has come to its end; one that was stopped or failed has not."""
    return arm.state in ("done", "diverged")


@contextlib.contextmanager
def _watching(
    arms: Sequence[Job], progress: _Progress, console: Console
) -> Iterator[Callable[[], None]]:
    """A function that shows all arms: a live table on a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        yield _line_printer(arms, progress, console)
        return

    def table() -> RenderableType:
        return _live_table(arms, progress, console.width)

    with Live(table(), console=console, refresh_per_second=4) as live:
        try:
            yield lambda: live.update(table())
        finally:  # without it a table that was interrupted would stay, and say "running"
            live.update(table())


def _line_printer(arms: Sequence[Job], progress: _Progress, console: Console) -> Callable[[], None]:
    from normrnn.engine.display import describe

    ended = [arm.out for arm in arms if arm.code is not None]
    printed = {arm.out: len(read_rows(arm.out / METRICS)) * (arm.out in ended) for arm in arms}
    failed: list[Path] = []

    def watch() -> None:
        others = any(arm.code is None for arm in arms)  # else the end itself says so
        every = [read_rows(arm.out / METRICS) for arm in arms]
        validated = False
        for arm, rows in zip(arms, every, strict=True):
            if others and arm.failed and arm.out not in failed:
                failed.append(arm.out)
                said = f"{arm.label} failed: {arm.last_words()}; the others go on"
                console.print(said, soft_wrap=True)
            fresh = rows[printed[arm.out] :]
            printed[arm.out] = len(rows)
            last = max((i for i, r in enumerate(fresh) if r["split"] == "train"), default=None)
            keeps = arm.config.normalisation.keeps_statistics
            for i, row in enumerate(fresh):
                if row["split"] == "train" and i != last:
                    continue
                told = describe(row, arm.config.epochs, arm.config.own_measure, keeps)
                console.print(f"{arm.label}: {told}", soft_wrap=True)
                validated = validated or row["split"] == "valid"
        if validated:
            console.print(progress.line(every), soft_wrap=True)

    return watch


def _live_table(arms: Sequence[Job], progress: _Progress, room: int = 80) -> RenderableType:
    """A row per run and the overall progress, with room for the terminal's ^C behind it."""
    from normrnn.reporting.groups import measure
    from normrnn.reporting.runs import Run

    runs = [Run(a.out, to_dict(a.config), read_rows(a.out / METRICS)) for a in arms]
    figure = measure(runs)
    table = Table(
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,
        caption=progress.line([run.rows for run in runs]),
        caption_justify="left",
    )
    figures = (f"train {figure.name}", f"{figure.held_out} {figure.name}")
    for name in ("run", "state", "epoch", "updates", *figures, "lr", "seconds"):
        side = "left" if name in ("run", "state") else "right"
        table.add_column(name, justify=side, no_wrap=name == "run")
    for arm, run in zip(arms, runs, strict=True):
        cells = [""] * 6
        if train := run.split("train"):
            last = train[-1]
            valid = run.split("valid", run.serving)
            cells = [
                f"{last['epoch']}/{arm.config.epochs}",
                f"{last['updates']:,}",
                figure.text(last["loss"]),
                figure.text(valid[-1]["loss"]) if valid else "",
                f"{last['lr']:g}",
                f"{last['seconds']:,.0f}",
            ]
        table.add_row(arm.label, arm.state, *cells)
    return Constrain(table, room - 3)
