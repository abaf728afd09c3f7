"""Train several normalisations with several seeds and compare them: `normrnn.compare`."""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from normrnn.arrays.read import KEYS, write_arrays
from normrnn.config.base import Config, checked_norms
from normrnn.config.registry import use_norms, with_settings
from normrnn.errors import UsageError
from normrnn.experiments import jobs
from normrnn.experiments.functions import run_functions
from normrnn.experiments.search import Space, plan_tuning, tune_setting
from normrnn.experiments.training import Recipe, default_directory, resolve
from normrnn.files import expanded
from normrnn.processes import DIVERGED
from normrnn.recipes import usual_norms
from normrnn.reporting.pictures import why_no_pictures
from normrnn.reporting.result import Result
from normrnn.reporting.study import RecordedStudy
from normrnn.verdicts.verdict import Settings

DEFAULT_NORMS = ("none", "sequence")


def compare(
    what: Recipe | Callable[..., Any] | None = None,
    *,
    x: Any = None,
    y: Any = None,
    norms: str | Sequence[str | None] = DEFAULT_NORMS,
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
) -> Result:
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
    if not isinstance(norms, Iterable):
        raise UsageError(f"norms takes a list or a comma-separated string, not {norms!r}")
    chosen = norms if norms is DEFAULT_NORMS else use_norms(norms, path)
    arrays = {name: settings.pop(name) for name in KEYS & settings.keys()} | {"x": x, "y": y}
    arrays = {name: value for name, value in arrays.items() if value is not None}
    if arrays and not what is data is None:
        raise UsageError("compare takes arrays, or a recipe or function and its data, not both")
    if what is None and not arrays:
        raise UsageError("compare needs a recipe, a function, or x and y")
    jobs.check_counts(seeds=seeds, workers=workers, processes=processes)
    Settings(target=target)  # UsageError before anything is trained
    train = resolve(what or "arrays", path)
    name, studies = train.recipe if isinstance(train, Config) else "", []
    with ExitStack() as cleanup:
        if out is None and (arrays or not name):
            out = tempfile.mkdtemp(prefix="normrnn-")
            cleanup.callback(shutil.rmtree, out, ignore_errors=True)
        else:
            out = expanded(out or default_directory(name))
            cleanup.push(partial(_explain_resume, out))
        out = Path(out)
        if isinstance(train, Config):
            if higher_is_better:
                raise UsageError("higher_is_better is for functions: a recipe knows its measure")
            settings |= {} if data is None else {"data": str(data)}
            config = with_settings(train, settings)
            if arrays:
                file = write_arrays(arrays, config.arrays, out)  # type: ignore[attr-defined]
                config = replace(config, data=str(file))
            usual = usual_norms(config) if norms is DEFAULT_NORMS else chosen
            names = checked_norms(usual, "--norms")
            tuning = plan_tuning(config, tune) if tune else None
            jobs.check_out(out)
            logs = ["tensorboard"] * tensorboard + ["csv"] * csv
            runner = jobs.Runner(replace(config, norm=names[-1]), workers, processes, logs)
            if omitted := why_no_pictures():  # said now, not after hours of training
                jobs.say(omitted)
            source = runner.data.source
            jobs.say(f"data: {source.removeprefix(f'{config.data}: ') if arrays else source}")
            planned = jobs.plan(config, names, seeds, out)
            runs, studies = [job.out for job in planned], _train(planned, tuning, runner)
        else:
            options = {"processes": processes > 1, "tune": tune, "tensorboard": tensorboard}
            if wrong := [name for name, value in {**options, "csv": csv}.items() if value]:
                raise UsageError(f"{wrong[0]} is for recipes, not for a function")
            settings |= {} if data is None else {"data": data}
            jobs.check_out(out)
            calls = (train, chosen, seeds, out, workers, higher_is_better, settings)
            name, runs = run_functions(*calls)
        result = jobs.write_result(runs, f"normrnn compare {name}", out, studies, target)
        weakref.finalize(result, cleanup.pop_all().close)
    return result


def _explain_resume(out: Path, kind: type[BaseException] | None, *_: object) -> None:
    """Say how to continue where Ctrl-C ends a comparison whose directory stays."""
    if kind is not None and issubclass(kind, KeyboardInterrupt):
        jobs.say(f"stopped; the same command resumes what has not ended in {out}")


def _train(
    runs: list[jobs.RunJob], tuning: tuple[Config, Space] | None, runner: jobs.Runner
) -> list[RecordedStudy]:
    """Tune, if asked to, and train every run; return the study of the tuning."""
    studies = []
    if tuning is not None:
        tuned, study = tune_setting(*tuning, runs, runner)
        studies.append(study)
        for job in runs:
            job.config = with_settings(job.config, tuned[job.config.norm])
    runner.train(runs)
    for job in runs:
        if job.code == DIVERGED:
            jobs.say(f"{job.label} diverged: {job.failure_reason()}")
    return studies
