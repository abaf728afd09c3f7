"""`normrnn compare RECIPE`."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from tyro.conf import arg

from normrnn.commands.jobs import Job, Jobs, plan
from normrnn.commands.options import parse, split_recipe
from normrnn.commands.tuning import Tuning, tuned, tuning
from normrnn.config.base import Config, check_norm
from normrnn.config.jsonio import to_dict
from normrnn.console import PlainConsole
from normrnn.errors import UsageError
from normrnn.files import refuse_stream
from normrnn.processes import usable_cores
from normrnn.recipes import read_config, usual_norms
from normrnn.recipes import recipe as named
from normrnn.runs.names import CONFIG, METRICS
from normrnn.runs.rows import read_rows
from normrnn.search.space import with_fields

if TYPE_CHECKING:
    from normrnn.report.runs import Run
    from normrnn.report.study import RecordedStudy


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

    def options(
        config: Annotated[Config, arg(name="")] = default,
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
            config: The experiment; its norm and threads are set per process.
            norms: Normalisations to compare, comma-separated; none is the baseline.
            seeds: How many seeds, from --seed on.
            jobs: Runs at a time; 0 for as many as there are cores to use.
            processes: Of each run, which train it together; its batch is shared among them.
            out: Holds one run directory per run, curves.png and report.html; runs/RECIPE
                unless given.
            tensorboard: Also write the rows for tensorboard, in the run directories.
            target: A figure to reach on validation (perplexity, nats, FCE): the updates and
                seconds that each arm needed.
            tune: A field to tune for each arm, on validation, before the seeds run, as in
                optimizer.lr; without it all arms have the same settings.
            tune_values: What to try; a third of it, itself and three times itself unless given.
            tune_epochs: Epochs of each try; 0 for those of the experiment.
        """
        given = {"norms": tuple(norms.split(",")), "seeds": seeds, "jobs": jobs, "out": out}
        given |= {"tensorboard": tensorboard, "target": target, "processes": processes}
        return config, {**given, "tune": tune, "values": tune_values, "epochs": tune_epochs}

    config, given = parse(options, f"compare {default.recipe}", rest)
    if config.norm != default.norm:
        raise UsageError(f"compare takes --norms, as in --norms none,{config.norm}, not --norm")
    _compare(config, _request(config, **given))
    return 0


def _request(
    config: Config, *, tune: str, values: str, epochs: int, out: Path | None, **given: Any
) -> Request:
    """UsageError for what cannot be done."""
    norms = tuple(dict.fromkeys(given.pop("norms")))
    for norm in norms:
        check_norm(norm, "--norms")
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
    norms: Sequence[str] | None = None,
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
) -> "list[Run]":
    """What `normrnn compare RECIPE` does, the runs given back as plain data.

    `norms` are ("none", "frame") unless given, or the pair that the paper compared; `fields` are
    settings of the recipe, those of a part as a dict: `epochs=2, model={"hidden": 64}`. The runs
    train in processes of their own, `processes` each, in `out`/NORM-SEED; calling again goes on
    where they stopped. `target` is a figure to reach on validation; `tune` names a field to tune
    for each arm before the seeds run, as in "optimizer.lr". `normrnn.report.figure(runs)` draws
    the runs, `normrnn.report.verdict(runs)` judges them.
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


def _compare(config: Config, request: Request) -> "list[Run]":
    from normrnn.report.groups import groups
    from normrnn.report.page import evidence
    from normrnn.report.pictures import can_draw, figure, save
    from normrnn.report.runs import find
    from normrnn.report.tables import runs_table
    from normrnn.report.verdict import group_verdict
    from normrnn.report.write import refuse_other, write_report

    out, console, draws = request.out, PlainConsole(), can_draw()
    if not draws:  # said now, not after hours
        needed = "pip install 'normrnn[report]'"
        console.print(f"text only: curves.png and report.html need matplotlib: {needed}")
    else:
        refuse_other(out / "report.html")
    arms = plan(config, request.norms, request.seeds, out)
    if request.tensorboard:
        from normrnn.engine.tensorboard import require_tensorboard

        require_tensorboard()
        arms = [replace(arm, options=["--tensorboard"]) for arm in arms]
    studies = []
    try:
        if request.tuning is not None:
            _refuse_untuned(arms, request.tuning, out)
            chosen, study = _tuned(config, request, request.tuning, console)
            arms = [_with(arm, request.tuning.field, chosen[arm.config.norm]) for arm in arms]
            studies.append(study)
        _train(arms, request, console)
        for arm in arms:
            if arm.state == "diverged" and arm.child is not None:
                said = f"{arm.out.name} diverged: {arm.child.last_words()}"
                console.print(said, soft_wrap=True)
    except KeyboardInterrupt:
        stopped = f"stopped; the same command goes on from the checkpoints in {out}"
        console.print(stopped, soft_wrap=True)
        raise
    directories = find([arm.out for arm in arms])
    runs = [one.run for one in directories if one.run is not None]
    parts = groups(runs)
    verdicts = [group_verdict(group, request.target) for group in parts]
    for group, verdict in zip(parts, verdicts, strict=True):
        console.print(runs_table(group, authors=False))
        for table in evidence(group, verdict, request.target):
            console.print(table)
    if draws:
        save(figure(runs), out / "curves.png")
        title = f"normrnn compare {config.recipe}"
        write_report(directories, out / "report.html", title, studies, request.target)
        for what, path in (("curves", out / "curves.png"), ("report", out / "report.html")):
            console.print(f"{what}: {path}", soft_wrap=True)
    for text in (text for verdict in verdicts for text in verdict.sentences):
        console.print(text)
    return runs


def _tuned(
    config: Config, request: Request, wanted: Tuning, console: Console
) -> "tuple[dict[str, Any], RecordedStudy]":
    arms = wanted.arms(config, request.norms, request.out)
    each = "1 epoch" if wanted.epochs == 1 else f"{wanted.epochs} epochs"
    console.print(f"tuning {wanted.field}: {len(arms)} runs of {each}")
    chosen, study = tuned(wanted, arms, lambda a: _train(a, request, console), request.out)
    console.print(study.said)
    return chosen, study


def _refuse_other(arms: Sequence[Job]) -> None:
    """An arm that was begun with other settings, or on other data, is known before any other is
    trained."""
    begun = [arm for arm in arms if (arm.out / CONFIG).exists()]
    if not begun:
        return
    from normrnn.engine.start import open_experiment, refuse_changes
    from normrnn.runs.store import RunDirectory

    data = open_experiment(begun[0].config)
    for arm in begun:
        old = RunDirectory(arm.out).config()
        known = old.data_sha256 in (data.sha256, data.older_sha256)
        found = old.data_sha256 if known else data.sha256
        refuse_changes(old, replace(arm.config, data_sha256=found), arm.out)


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


def _train(arms: Sequence[Job], request: Request, console: Console) -> None:
    _refuse_other(arms)
    for arm in arms:
        arm.processes = request.processes
    jobs = request.jobs or max(1, usable_cores() // request.processes)
    with _watching(arms, console) as watch:
        Jobs(arms, jobs).run(watch)


@contextlib.contextmanager
def _watching(arms: Sequence[Job], console: Console) -> Iterator[Callable[[], None]]:
    """A function that shows all arms: a live table on a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        yield _line_printer(arms, console)
        return
    with Live(_live_table(arms), console=console, refresh_per_second=4) as live:
        yield lambda: live.update(_live_table(arms))


def _line_printer(arms: Sequence[Job], console: Console) -> Callable[[], None]:
    from normrnn.engine.display import describe

    printed = dict.fromkeys((arm.out for arm in arms), 0)
    failed: list[Path] = []

    def watch() -> None:
        others = any(arm.code is None for arm in arms)  # else the end itself says so
        for arm in arms:
            if others and arm.failed and arm.child is not None and arm.out not in failed:
                failed.append(arm.out)
                said = f"{arm.out.name} failed: {arm.child.last_words()}; the others go on"
                console.print(said, soft_wrap=True)
            rows = read_rows(arm.out / METRICS)
            fresh = rows[printed[arm.out] :]
            printed[arm.out] = len(rows)
            last = max((i for i, r in enumerate(fresh) if r["split"] == "train"), default=None)
            for i, row in enumerate(fresh):
                if row["split"] == "train" and i != last:
                    continue
                told = describe(row, arm.config.epochs, arm.config.own_measure)
                console.print(f"{arm.out.name}: {told}", soft_wrap=True)

    return watch


def _live_table(arms: Sequence[Job]) -> Table:
    from normrnn.report.measure import measure
    from normrnn.report.runs import Run

    runs = [Run(a.out, to_dict(a.config), read_rows(a.out / METRICS)) for a in arms]
    figure = measure(runs)
    table = Table()
    figures = (f"train {figure.name}", f"{figure.held_out} {figure.name}")
    for name in ("arm", "state", "epoch", "updates", *figures, "lr", "seconds"):
        table.add_column(name, justify="left" if name in ("arm", "state") else "right")
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
        table.add_row(arm.out.name, arm.state, *cells)
    return table
