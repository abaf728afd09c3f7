"""`normrnn search RECIPE`."""

from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from normrnn.commands.options import Directory, chosen_config, parse, split_recipe
from normrnn.config.base import Config, checked_norms
from normrnn.experiments.search.run import SearchRequest, search
from normrnn.experiments.search.space import read_space
from normrnn.experiments.training import folder_name


def run(arguments: list[str]) -> int:
    """Search the settings of a recipe."""
    default, rest = split_recipe("search", arguments, hide_norm=True)

    def options(
        config: Annotated[Config, arg(name="")] = default,
        trials: int = 52,
        storage: Annotated[str, arg(metavar="URL")] = "",
        study: str = "",
        space: Annotated[Path | None, arg(metavar="FILE")] = None,
        norms: str = "none,hidden",
        sampler: str = "random",
        pruner: str = "none",
        workers: int = 1,
        processes: int = 1,
        heartbeat: int = 60,
        confirm: Annotated[int, arg(metavar="N")] = 0,
        out: Directory = None,
        path: Directory = None,
    ) -> dict[str, Any]:
        """Train every norm with the same settings, drawn from a space, and compare them.

        A trial is one setting with all norms; its objective is the lower validation loss. A setting
        is pruned only if the pruner stops every norm, and then counts for none. The same command,
        here or on another machine, joins the study; starting again resumes it.

        Args:
            config: The experiment; the space and --norms set the rest.
            trials: Settings of the study, over all workers.
            storage: sqlite:///FILE (default: study.db in DIR), or
                postgresql://USER@HOST/DATABASE for workers on several machines.
            study: Name of the study in the storage; the recipe's unless given.
            space: JSON file: field to a list of values or to {"low", "high", "log"}; the paper's
                unless given, where the paper has one.
            norms: Normalisations of a trial, comma-separated; none is the baseline.
            sampler: Optuna's: random, tpe, bruteforce.
            pruner: Optuna's: none, median, hyperband, successivehalving.
            workers: Processes of this command, one thread each unless --threads says otherwise.
            processes: Processes that train each run of a worker together.
            heartbeat: Seconds between signs of life; a worker silent for three times as long is
                dead, and its trial is run again.
            confirm: Train the best setting of each norm again with N fresh seeds, in DIR/confirm,
                and compare them with intervals.
            out: Run directories and results; runs/RECIPE-search unless given.
            path: Directory of the modules that import paths (module:name) name.
        """
        return dict(locals())

    chosen = parse(options, f"search {default.recipe}", rest)
    config = chosen_config(chosen.pop("config"))
    chosen["norms"] = checked_norms(chosen["norms"], "--norms")
    chosen["out"] = chosen["out"] or Path("runs") / f"{folder_name(config.recipe)}-search"
    space_file, _ = chosen.pop("space"), chosen.pop("path")
    request = SearchRequest(**chosen)
    request.check()
    return search(config, read_space(space_file, config, request.norms), request)
