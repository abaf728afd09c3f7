"""Train several normalisations with several seeds and compare them: `normrnn.compare`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normrnn.config.base import Config, checked_norms
from normrnn.config.extensions import find, is_import_path, is_recipe, use_norms
from normrnn.config.registry import with_fields
from normrnn.console import PlainConsole
from normrnn.engine.launch import DIVERGED
from normrnn.errors import UsageError
from normrnn.experiments.arrays import array_parts, write_arrays
from normrnn.experiments.functions import run_functions
from normrnn.experiments.jobs import RunJob, plan, run_jobs
from normrnn.experiments.outcome import TemporaryFolder, check_report, conclude
from normrnn.experiments.progress import Progress
from normrnn.experiments.training import Recipe, configured, folder_name, log_names
from normrnn.experiments.tuning import tune_setting, tuning
from normrnn.processes import usable_cores
from normrnn.recipes import usual_norms
from normrnn.runs.names import CONFIG
from normrnn.runs.note import read_note
from normrnn.verdicts.verdict import check_target

if TYPE_CHECKING:
    from normrnn.engine.task import Task
    from normrnn.reporting.result import Result

DEFAULT_NORMS = ("none", "sequence")
Norms = str | Sequence[str | None]


def compare(
    what: Recipe | Callable[..., Any] | None = None,
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
        data: What to train on; of a function, an argument for it.
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
    chosen = norms if norms is DEFAULT_NORMS else use_norms(norms, path)
    parts = array_parts({"x": x, "y": y}, settings)
    if parts and what is not None:
        raise UsageError("compare takes arrays, or a recipe or function, not both")
    if parts and data is not None:
        raise UsageError("compare takes arrays, or data, not both")
    if what is None and not parts:
        raise UsageError("compare needs a recipe, a function, or x and y")
    _check_counts(seeds=seeds, workers=1 if workers is None else workers, processes=processes)
    train = None if what is None else _function(what, path)
    folder = TemporaryFolder() if out is None and (parts or train is not None) else None
    check_target(target)
    if train is not None:
        recipe_only = {"processes": processes > 1, "tune": tune, "tensorboard": tensorboard}
        if given := [name for name, value in {**recipe_only, "csv": csv}.items() if value]:
            raise UsageError(f"{given[0]} is for recipes, not for a function")
        if data is not None:
            settings["data"] = data
        place = folder.path if folder else Path(str(out))
        check_report(place)
        function, runs = run_functions(
            train, chosen, seeds, place, workers, higher_is_better, settings
        )
        return replace(conclude(runs, function, place, target), folder=folder)
    if higher_is_better:
        raise UsageError("higher_is_better is for functions: a recipe knows its measure")
    config = configured(what or "arrays", data, settings, path)
    place = folder.path if folder else Path(out or Path("runs") / folder_name(config.recipe))
    if parts:
        config = replace(config, data=str(write_arrays(parts, config, place)))
    comparison = Comparison(
        config,
        checked_norms(usual_norms(config) if norms is DEFAULT_NORMS else chosen, "--norms"),
        place,
        workers or 0,
        processes,
        log_names(tensorboard, csv),
    )
    return replace(comparison.run(seeds, target, tune), folder=folder)


def _function(what: Any, path: str | Path | None) -> Callable[..., Any] | None:
    """Return the training function that is named or given; None for a recipe."""
    found = find(what, path) if is_import_path(what) else what
    if isinstance(found, str | Config) or is_recipe(found) or not callable(found):
        return None
    return found


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise UsageError(f"--{name} must be at least 1, not {count}")


class Comparison:
    """Runs of a recipe with several norms."""

    def __init__(
        self,
        config: Config,
        norms: Sequence[str],
        out: Path,
        workers: int,
        processes: int,
        logs: Sequence[str],
    ) -> None:
        self.config, self.norms, self.out = config, norms, out
        self.workers, self.processes, self.logs = workers, processes, logs
        self.console = PlainConsole()
        self.say = partial(self.console.print, soft_wrap=True)

    def run(
        self, seeds: int, target: float | None, tune: str | Mapping[str, Any] | None
    ) -> "Result":
        """Train what was asked for, write the report and return the result."""
        from normrnn.engine.start import open_experiment
        from normrnn.runs.environment import named_device

        config, out, say = self.config, self.out, self.say
        wanted = tuning(config, self.norms, tune) if tune else None
        omitted = check_report(out)
        if "tensorboard" in self.logs:
            from normrnn.engine.callbacks import require_tensorboard

            require_tensorboard()
        named_device(config.device)
        self.data = open_experiment(replace(config, norm=self.norms[-1]))
        jobs = plan(config, self.norms, seeds, out)
        if omitted:  # said now, not after hours of training
            say(omitted)
        own_file = Path(config.data).parent == out  # arrays given in Python
        source = self.data.source
        say(f"data: {source.removeprefix(f'{config.data}: ') if own_file else source}")
        studies = []
        try:
            if wanted is not None:
                wanted.refuse_untuned([job.out for job in jobs], out)
                values, study = tune_setting(wanted, config, self.norms, out, self.train, say)
                studies.append(study)
                for job in jobs:
                    value = values[job.config.norm]
                    job.config = with_fields(job.config, {wanted.field: value})
            self.train(jobs)
        except KeyboardInterrupt:
            say(f"stopped; the same command resumes from the checkpoints in {out}")
            raise
        for job in jobs:
            if job.state == "diverged":
                say(f"{job.label} diverged: {job.last_words()}")
        return conclude([job.out for job in jobs], config.recipe, out, target, studies)

    def train(self, jobs: Sequence[RunJob]) -> None:
        """Run jobs to their end; UsageError, before any starts, if one was begun differently."""
        from normrnn.engine.start import refuse_changes
        from normrnn.runs.store import RunDirectory

        for job in jobs:
            job.config = replace(job.config, **self.data.settings)
            job.processes, job.options = self.processes, self.logs
            if (job.out / CONFIG).exists():
                completed = self.data.completed(job.config)
                refuse_changes(RunDirectory(job.out).config(), completed, job.out)
        for job in jobs:
            if (job.out / CONFIG).exists():
                _mark_ended(job)
        if all(job.code is not None for job in jobs):
            return
        updates = _updates(jobs[0].config.epochs, self.data, self.say)
        cores = self.processes * max(job.config.threads for job in jobs)
        workers = self.workers or max(1, usable_cores() // cores)
        with Progress(jobs, updates, self.console).shown() as watch:
            run_jobs(jobs, workers, watch)


def _mark_ended(job: RunJob) -> None:
    """Mark a run that has ended as asked: it is read, not started again."""
    from normrnn.reporting.runs import examine

    found = examine(job.out)
    run, is_sure = found.run, found.verified and not found.problem and not found.words
    if run is None or not is_sure or run.training:
        return  # the process that resumes it says what is wrong
    if run.config.get("epochs") != job.config.epochs:
        return
    if "tensorboard" in job.options and not (job.out / "tensorboard").is_dir():
        return
    if run.diverged:
        job.ended, job.reason = DIVERGED, run.diverged
    elif (note := read_note(job.out)) and note.finished == job.config.epochs:
        job.ended = 0


def _updates(epochs: int, data: "Task", say: Callable[[str], None]) -> int:
    """Count the updates of a run. Building its task finds data that cannot be trained on."""
    import torch

    with torch.random.fork_rng(devices=[]):
        task = data.build(torch.device("cpu"))
    if task.data_summary:
        say(task.data_summary)
    return sum(task.updates(epoch) for epoch in range(epochs))
