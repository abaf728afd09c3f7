"""Commands that train: train, compare and search. The first argument decides the options."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from normrnn import norms as table
from normrnn.commands.options import Directory, parse, split_recipe
from normrnn.config.base import Config
from normrnn.errors import UsageError
from normrnn.experiments.compare import compare as run_comparison
from normrnn.experiments.search import search as run_search
from normrnn.experiments.training import default_directory, train_until_stopped
from normrnn.processes import rank_and_size
from normrnn.recipes import usual_norms
from normrnn.reporting.result import REPORT, report_line


def train(arguments: list[str]) -> int:
    """Train a recipe, or resume a run; started by torchrun, together with the other processes."""
    resumes = "normrnn train RUN_DIR [OPTIONS] resumes a run"
    default, rest = split_recipe("train", arguments, resumes)
    is_directory = default.recipe != arguments[0]

    def options(
        config: Annotated[Config, arg(name="")] = default,
        norm: Annotated[str, arg(metavar="{" + ",".join(table.names()) + "}")] = default.norm,
        out: Directory = Path(arguments[0]) if is_directory else None,
        tensorboard: bool = False,
        csv: bool = False,
    ) -> tuple[Config, Path | None, list[str]]:
        """Train a recipe. Starting again in the same directory resumes it.

        Args:
            config: The experiment.
            norm: Normalisation of the recurrent layers; none is the baseline.
            out: Run directory; runs/RECIPE-NORM-SEED unless given.
            tensorboard: Also write the rows for TensorBoard, in the run directory.
            csv: Also write the rows to metrics.csv in the run directory.
        """
        logs = ["tensorboard"] * tensorboard + ["csv"] * csv
        return replace(config, norm=norm), out, logs

    config, out, logs = parse(options, f"train {arguments[0]}", rest, imports=True)
    out = out or default_directory(config.recipe, config.norm, config.seed)
    if rank_and_size()[0] == 0:
        print(f"{config.recipe}, norm {config.norm}, seed {config.seed}: {out}", flush=True)
    return train_until_stopped(config, out, logs)


def compare(arguments: list[str]) -> int:
    """Train a recipe or a function with several normalisations and compare them."""
    default, rest = split_recipe("compare", arguments)
    options = _recipe_options(default) if isinstance(default, Config) else _function_options
    try:
        given = parse(options, f"compare {arguments[0]}", rest, imports=True)
    except SystemExit as ended:
        if ended.code and options is _function_options:
            text = "a function takes no settings on the command line: pass them in Python,"
            print(f"{text} normrnn.compare(train, name=value)", file=sys.stderr)
        raise
    out = given.pop("out") or default_directory(arguments[0])
    result = run_comparison(given.pop("what", default), out=out, **given)
    print(f"{result}\n{report_line(out / REPORT)}")
    return 0


def _recipe_options(default: Config) -> Any:
    def options(
        what: Annotated[Config, arg(name="")] = default,
        norms: str = ",".join(usual_norms(default)),
        seeds: int = 1,
        workers: int | None = None,
        processes: int = 1,
        out: Directory = None,
        tensorboard: bool = False,
        csv: bool = False,
        target: float | None = None,
        tune: Annotated[str, arg(metavar="FIELD")] = "",
        tune_values: Annotated[str, arg(metavar="V,V,...")] = "",
        tune_epochs: int = 0,
    ) -> dict[str, Any]:
        """Train every normalisation with every seed, in processes of their own, and compare them.

        Args:
            what: The experiment; 0 threads are 1 per process.
            norms: Normalisations to compare, comma-separated; none is the baseline.
            seeds: How many seeds, from --seed on.
            workers: Runs at a time; by default as many as there are cores to use.
            processes: Processes that train each run together; they share its batches.
            out: Holds one run directory per run, and report.html; runs/RECIPE unless given.
            tensorboard: Also write the rows for TensorBoard, in the run directories.
            csv: Also write the rows to metrics.csv in the run directories.
            target: A validation value to reach, instead of one that every run reaches.
            tune: A setting to tune for each norm, on validation, before the seeds run, as in
                optimizer.lr; without it all norms have the same settings.
            tune_values: What to try; a third of it, itself and three times itself unless given.
            tune_epochs: Epochs of each try; 0 for those of the experiment.
        """
        given: dict[str, Any] = dict(locals())
        values = [value for value in given.pop("tune_values").split(",") if value]
        epochs = given.pop("tune_epochs")
        if (values or epochs) and not tune:
            raise UsageError("--tune-values and --tune-epochs need --tune FIELD")
        return {**given, "tune": {tune: values, "epochs": epochs} if tune else None}

    return options


def _function_options(
    norms: str = "none,sequence",
    seeds: int = 1,
    workers: int = 1,
    out: Directory = None,
    target: float | None = None,
    higher_is_better: bool = False,
) -> dict[str, Any]:
    """Call train(norm, seed, log) with every normalisation and seed, and compare the results.

    Args:
        norms: What the function is called with, comma-separated; none is None, the baseline.
        seeds: How many seeds, from 1 on.
        workers: Calls at a time, each in a process of its own.
        out: Holds one run directory per call, and report.html; runs/MODULE.FUNCTION unless
            given. Calls that have ended are not repeated.
        target: A validation value to reach, instead of one that every run reaches.
        higher_is_better: Larger values are better.
    """
    return dict(locals())


def search(arguments: list[str]) -> int:
    """Search the settings of a recipe."""
    default, rest = split_recipe("search", arguments)

    def options(
        config: Annotated[Config, arg(name="")] = default,
        trials: int = 52,
        space: Annotated[Path | None, arg(metavar="FILE")] = None,
        norms: str = ",".join(usual_norms(default)),
        sampler: Literal["random", "bruteforce"] = "random",
        workers: int = 1,
        processes: int = 1,
        confirm: Annotated[int, arg(metavar="N")] = 0,
        out: Directory = None,
    ) -> dict[str, Any]:
        """Train every norm with the same settings, drawn from a space, and compare them.

        A trial is one setting with all norms. The same command again resumes; on several machines
        that share DIR, it divides the work.

        Args:
            config: The experiment; the space and --norms set the rest.
            trials: Settings of the study, over all commands.
            space: JSON file: field to a list of values or to {"low", "high", "log"}; the paper's
                unless given, where the paper has one.
            norms: Normalisations of a trial, comma-separated; none is the baseline.
            sampler: random, or bruteforce, which tries every setting.
            workers: Runs at a time, one thread each unless --threads says otherwise.
            processes: Processes that train each run together.
            confirm: Train the best setting of each norm again with N fresh seeds, in DIR/confirm,
                and compare them with intervals.
            out: Run directories and results; runs/RECIPE-search unless given.
        """
        return dict(locals())

    run_search(**parse(options, f"search {default.recipe}", rest, imports=True))
    return 0
