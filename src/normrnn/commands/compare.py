"""`normrnn compare RECIPE` and `normrnn compare MODULE:FUNCTION`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from normrnn.commands.options import Directory, chosen_config, named_function, parse, split_recipe
from normrnn.config.base import Config
from normrnn.console import PlainConsole
from normrnn.errors import UsageError
from normrnn.experiments.compare import REPORT, check_report, compare
from normrnn.experiments.training import folder_name
from normrnn.recipes import usual_norms

if TYPE_CHECKING:
    from normrnn.reporting.result import Result


def run(arguments: list[str]) -> int:
    """Train a recipe or a function with several normalisations and compare them."""
    if name := named_function(arguments):
        return _compare_function(name, arguments[1:])
    default, rest = split_recipe("compare", arguments, hide_norm=True)

    def options(
        config: Annotated[Config, arg(name="")] = default,
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
        path: Directory = None,  # noqa: ARG001  read by import_named
    ) -> dict[str, Any]:
        """Train every normalisation with every seed, in processes of their own, and compare them.

        Args:
            config: The experiment; 0 threads are 1 per process.
            norms: Normalisations to compare, comma-separated; none is the baseline.
            seeds: How many seeds, from --seed on.
            workers: Runs at a time; by default as many as there are cores to use.
            processes: Processes that train each run together; they share its batches.
            out: Holds one run directory per run, and report.html; runs/RECIPE unless given.
            tensorboard: Also write the rows for TensorBoard, in the run directories.
            csv: Also write the rows to metrics.csv in the run directories.
            target: A validation value to reach (perplexity, nats, FCE), instead of one that
                every run reaches.
            tune: A setting to tune for each norm, on validation, before the seeds run, as in
                optimizer.lr; without it all norms have the same settings.
            tune_values: What to try; a third of it, itself and three times itself unless given.
            tune_epochs: Epochs of each try; 0 for those of the experiment.
            path: Directory of the modules that import paths (module:name) name.
        """
        values = [value for value in tune_values.split(",") if value]
        if (values or tune_epochs) and not tune:
            raise UsageError("--tune-values and --tune-epochs need --tune FIELD")
        return {
            **{"what": chosen_config(config), "norms": norms, "seeds": seeds, "workers": workers},
            **{"processes": processes, "out": out, "tensorboard": tensorboard, "csv": csv},
            **{"target": target, "tune": {tune: values, "epochs": tune_epochs} if tune else None},
        }

    given = parse(options, f"compare {default.recipe}", rest)
    place = given["out"] = given["out"] or Path("runs") / folder_name(default.recipe)
    return _show(compare(**given), place)


def _compare_function(name: str, arguments: list[str]) -> int:
    def options(
        norms: str = "none,sequence",
        seeds: int = 1,
        workers: int = 1,
        out: Directory = None,
        target: float | None = None,
        higher_is_better: bool = False,
        path: Directory = None,
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
            path: Directory of the module.
        """
        return dict(locals())

    given = parse(options, f"compare {name}", arguments)
    place = given.pop("out") or Path("runs") / folder_name(name)
    return _show(compare(name, out=place, **given), place)


def _show(result: "Result", out: Path) -> int:
    console, omitted = PlainConsole(soft_wrap=True), check_report(out)
    console.print(str(result))
    if (out / REPORT).exists():
        console.print(f"report: {out / REPORT}{f' ({omitted})' if omitted else ''}")
    else:
        console.print(omitted)
    return 0
