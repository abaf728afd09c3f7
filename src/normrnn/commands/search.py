"""`normrnn search RECIPE`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from normrnn.commands.options import Directory, parse, split_recipe
from normrnn.config.base import Config
from normrnn.experiments.search import search


def run(arguments: list[str]) -> int:
    """Search the settings of a recipe."""
    default, rest = split_recipe("search", arguments)

    def options(
        config: Annotated[Config, arg(name="")] = default,
        trials: int = 52,
        space: Annotated[Path | None, arg(metavar="FILE")] = None,
        norms: str = "none,hidden",
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

    search(**parse(options, f"search {default.recipe}", rest, imports=True))
    return 0
