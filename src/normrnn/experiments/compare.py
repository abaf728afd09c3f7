"""Train several normalisations with several seeds and compare them: `normrnn.compare`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from normrnn.config.base import Config, checked_norms
from normrnn.config.extensions import find, is_import_path, is_recipe, use_norms
from normrnn.config.registry import with_fields
from normrnn.console import PlainConsole
from normrnn.engine.launch import DIVERGED
from normrnn.errors import UsageError
from normrnn.experiments.arrays import array_parts, write_arrays
from normrnn.experiments.functions import compare_function
from normrnn.experiments.jobs import RunJob, plan, run_jobs
from normrnn.experiments.outcome import TemporaryFolder, check_report, conclude
from normrnn.experiments.progress import Progress, watching
from normrnn.experiments.training import configured, folder_name, log_names
from normrnn.experiments.tuning import Tuning, tuned, tuning
from normrnn.files import refuse_stream
from normrnn.processes import usable_cores
from normrnn.recipes import usual_norms
from normrnn.runs.names import CONFIG
from normrnn.runs.note import read_note

if TYPE_CHECKING:
    from normrnn.engine.task import Task
    from normrnn.reporting.result import Result
    from normrnn.reporting.study import RecordedStudy

DEFAULT_NORMS = ("none", "sequence")
Norms = str | Sequence[str | None]


def compare(
    what: str | Callable[..., Any] | None = None,
    *,
    x: Any = None,
    y: Any = None,
    norms: Norms = DEFAULT_NORMS,
    seeds: int = 1,
    data: str | Path | None = None,
    out: str | Path | None = None,
    workers: int | None = None,
    processes: int = 1,
    target: float | None = None,
    tune: str | Mapping[str, Any] | None = None,
    higher_is_better: bool = False,
    path: str | Path | None = None,
    tensorboard: bool = False,
    csv: bool = False,
    **settings: Any,
) -> "Result":
    """Train every normalisation with every seed and compare them; calling again resumes.

    Args:
        what: A recipe's name, an import path `module:name` of a recipe or of a function, or a
            function `train(norm, seed, log)` with a training loop of its own, which calls
            `log(step=, train=, valid=, test=)` as often as it likes. Not needed with `x` and `y`.
        x: Sequences: an array (N, T, F), a list of (T_i, F) arrays, or rows (R, F) with
            `lengths=`. `x_train=`, `x_valid=`, `x_test=`, `groups=` and so on are those of the
            recipe `arrays`.
        y: Integers, labels or floats, per sequence or per step.
        norms: Normalisations, a sequence or a comma-separated string; None or "none" is the
            baseline. A recipe of the paper has its own pair unless `norms` is given.
        seeds: Number of seeds.
        data: What to train on.
        out: Directory for the runs, OUT/NORM-SEED. Runs that are there are resumed, or read if
            they have ended. By default runs/RECIPE; for arrays and functions, a temporary
            directory that is removed with the result.
        workers: Runs at a time; by default as many as there are cores. A function runs in this
            process unless `workers` is given.
        processes: Processes that train each run together.
        target: A validation value to reach, instead of one that every run reaches.
        tune: A setting to tune for each norm before the seeds run, as "optimizer.lr", or
            {"optimizer.lr": [0.1, 1.0], "epochs": 2} with the values and the epochs of each try.
        higher_is_better: Whether larger values of a function are better.
        path: Directory of the modules that import paths name.
        tensorboard: Also write the rows for TensorBoard, in the run directories.
        csv: Also write the rows to metrics.csv in the run directories.
        **settings: Settings of the recipe, as in `epochs=2, hidden=64, model={"momentum": 0.1}`;
            of a function, further arguments for it.

    Returns:
        A result to `print`, with `runs`, `plot()`, `save(path)` and `to_dict()`.
    """
    given = use_norms(norms, path) if norms is not DEFAULT_NORMS else norms
    parts = array_parts({"x": x, "y": y}, settings)
    if parts and what is not None:
        raise UsageError("compare takes arrays, or a recipe or function, not both")
    function = None if what is None else _function(what, path)
    with_folder = out is None and (parts or function is not None)
    folder = TemporaryFolder() if with_folder else None
    place = folder.path if folder else None if out is None else Path(out)
    if function is not None:
        assert place is not None
        _check_counts(seeds=(seeds, 1), workers=(1 if workers is None else workers, 1))
        result = compare_function(
            function, given, seeds, place, workers, target, higher_is_better, settings
        )
    else:
        if higher_is_better:
            raise UsageError("higher_is_better is for functions: a recipe knows its measure")
        if what is None and not parts:
            raise UsageError("compare needs a recipe, a function, or x and y")
        config = configured(what or "arrays", data, settings, path)
        if parts:
            assert place is not None
            config = replace(config, data=str(write_arrays(parts, config, place)))
        field, values, epochs = _tuning_arguments(tune)
        request = make_request(
            config,
            norms=usual_norms(config) if norms is DEFAULT_NORMS else given,
            seeds=seeds,
            workers=workers,
            processes=processes,
            out=place,
            logs=log_names(tensorboard, csv),
            target=target,
            tune=field,
            values=values,
            epochs=epochs,
        )
        result = compare_recipe(config, request)
    return replace(result, folder=folder)


def _function(what: Any, path: str | Path | None) -> Callable[..., Any] | None:
    """Return the training function that is named or given; None for a recipe."""
    found = find(what, path) if is_import_path(what) else what
    if isinstance(found, str) or is_recipe(found) or not callable(found):
        return None
    return found


def _tuning_arguments(tune: str | Mapping[str, Any] | None) -> tuple[str, tuple[Any, ...], int]:
    if tune is None or isinstance(tune, str):
        return tune or "", (), 0
    fields = {name: values for name, values in tune.items() if name != "epochs"}
    if len(fields) != 1:
        raise UsageError(f"tune names one setting, not {', '.join(fields) or 'none'}")
    ((field, values),) = fields.items()
    return field, tuple(values), tune.get("epochs", 0)


@dataclass(frozen=True)
class Request:
    """What to compare, besides the experiment itself."""

    norms: tuple[str, ...]
    seeds: int
    workers: int
    out: Path
    logs: Sequence[str] = ()
    target: float | None = None
    tuning: Tuning | None = None
    processes: int = 1


def make_request(
    config: Config,
    *,
    norms: Norms,
    seeds: int,
    workers: int | None,
    processes: int,
    out: Path | None,
    logs: Sequence[str],
    target: float | None,
    tune: str,
    values: Sequence[Any],
    epochs: int,
) -> Request:
    """Check what was asked for; UsageError for what cannot be done."""
    _check_counts(seeds=(seeds, 1), workers=(workers or 0, 0), processes=(processes, 1))
    if target is not None and not 0 < target < math.inf:
        raise UsageError(f"--target must be a number above 0, not {target}")
    if (values or epochs) and not tune:
        raise UsageError("--tune-values and --tune-epochs need --tune FIELD")
    refuse_stream(config.data)
    found = checked_norms(norms, "--norms")
    chosen = tuning(config, found, tune, values, epochs) if tune else None
    place = out or Path("runs") / folder_name(config.recipe)
    return Request(found, seeds, workers or 0, place, logs, target, chosen, processes)


def _check_counts(**counts: tuple[int, int]) -> None:
    for name, (count, least) in counts.items():
        if count < least:
            raise UsageError(f"--{name} must be at least {least}, not {count}")


def compare_recipe(config: Config, request: Request) -> "Result":
    """Train what was asked for, write the report and return the result."""
    out, console = request.out, PlainConsole()
    omitted = check_report(out)
    if "tensorboard" in request.logs:
        from normrnn.engine.callbacks import require_tensorboard

        require_tensorboard()
    jobs = plan(config, request.norms, request.seeds, out)
    data = _open_data(replace(config, norm=request.norms[-1]))
    if omitted:  # said now, not after hours of training
        console.print(omitted, soft_wrap=True)
    own_file = Path(config.data).parent == out  # arrays given in Python
    source = data.source.removeprefix(f"{config.data}: ") if own_file else data.source
    console.print(f"data: {source}", soft_wrap=True)
    studies = []
    try:
        if request.tuning is not None:
            _refuse_untuned(jobs, request.tuning, out)
            chosen, study = _tune(config, request, request.tuning, data, console)
            for job in jobs:
                value = chosen[job.config.norm]
                job.config = with_fields(job.config, {request.tuning.field: value})
            studies.append(study)
        _train(jobs, request, data, console)
        for job in jobs:
            if job.state == "diverged":
                console.print(f"{job.label} diverged: {job.last_words()}", soft_wrap=True)
    except KeyboardInterrupt:
        stopped = f"stopped; the same command resumes from the checkpoints in {out}"
        console.print(stopped, soft_wrap=True)
        raise
    return conclude([job.out for job in jobs], config.recipe, out, request.target, studies)


def _tune(
    config: Config, request: Request, wanted: Tuning, data: "Task", console: Console
) -> "tuple[dict[str, Any], RecordedStudy]":
    jobs = wanted.jobs(config, request.norms, request.out)
    each = "1 epoch" if wanted.epochs == 1 else f"{wanted.epochs} epochs"
    console.print(f"tuning {wanted.field}: {len(jobs)} runs of {each}")
    chosen, study = tuned(wanted, jobs, lambda j: _train(j, request, data, console), request.out)
    console.print(study.said)
    return chosen, study


def _open_data(config: Config) -> "Task":
    """Open the data before any run starts, so that a wrong --data or --device fails at once."""
    from normrnn.engine.start import open_experiment
    from normrnn.runs.environment import named_device

    named_device(config.device)
    return open_experiment(config)


def _refuse_changes(jobs: Sequence[RunJob], data: "Task") -> None:
    """UsageError if a run was begun with other settings or data, before any other is trained."""
    from normrnn.engine.start import refuse_changes
    from normrnn.runs.store import RunDirectory

    for job in jobs:
        if (job.out / CONFIG).exists():
            refuse_changes(RunDirectory(job.out).config(), data.completed(job.config), job.out)


def _mark_ended(jobs: Sequence[RunJob]) -> None:
    """Mark the runs that have ended as asked: they are read, not started again."""
    from normrnn.reporting.runs import examine

    for job in jobs:
        if not (job.out / CONFIG).exists():
            continue
        found = examine(job.out)
        run, is_sure = found.run, found.verified and not found.problem and not found.words
        if run is None or not is_sure or run.training:
            continue  # the process that resumes it says what is wrong
        if run.config.get("epochs") != job.config.epochs:
            continue
        if "tensorboard" in job.options and not (job.out / "tensorboard").is_dir():
            continue
        if run.diverged:
            job.ended, job.reason = DIVERGED, run.diverged
        elif (read_note(job.out) or {}).get("finished") == job.config.epochs:
            job.ended = 0


def _refuse_untuned(jobs: Sequence[RunJob], wanted: Tuning, out: Path) -> None:
    """UsageError, before anything is tuned, if a run of another comparison is there."""
    begun = [job for job in jobs if (job.out / CONFIG).exists()]
    if begun and not wanted.recorded(out):
        raise UsageError(
            f"{begun[0].out} was begun before {wanted.field} was tuned, and may not have the value"
            " that is chosen: use another --out"
        )


def _train(jobs: Sequence[RunJob], request: Request, data: "Task", console: Console) -> None:
    for job in jobs:
        job.config = replace(job.config, **data.settings)
        job.processes, job.options = request.processes, request.logs
    _refuse_changes(jobs, data)
    _mark_ended(jobs)
    if all(job.code is not None for job in jobs):
        return
    progress = Progress(jobs, _updates(jobs[0].config.epochs, data, console))
    cores = request.processes * max(job.config.threads for job in jobs)
    workers = request.workers or max(1, usable_cores() // cores)
    with watching(jobs, progress, console) as watch:
        run_jobs(jobs, workers, watch)


def _updates(epochs: int, data: "Task", console: Console) -> int:
    """Count the updates of a run. Building its task finds data that cannot be trained on."""
    import torch

    with torch.random.fork_rng(devices=[]):
        task = data.build(torch.device("cpu"))
    if summary := getattr(task, "data_summary", ""):
        console.print(summary)
    return sum(task.updates(epoch) for epoch in range(epochs))
