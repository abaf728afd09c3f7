"""`normrnn train RECIPE` and `normrnn train RUN_DIR`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from normrnn import norms
from normrnn.commands.options import Directory, parse, split_recipe
from normrnn.config.base import Config
from normrnn.engine.launch import rank_and_size
from normrnn.experiments.training import default_directory, log_names, train_until_stopped


def run(arguments: list[str]) -> int:
    """Train a recipe, or resume a run; started by torchrun, together with the other processes."""
    resumes = "normrnn train RUN_DIR [OPTIONS] resumes a run"
    default, rest = split_recipe("train", arguments, resumes)
    is_directory = default.recipe != arguments[0]

    def options(
        config: Annotated[Config, arg(name="")] = default,
        norm: Annotated[str, arg(metavar="{" + ",".join(norms.names()) + "}")] = default.norm,
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
        return replace(config, norm=norm), out, log_names(tensorboard, csv)

    config, out, logs = parse(options, f"train {arguments[0]}", rest, imports=True)
    out = out or default_directory(config.recipe, config.norm, config.seed)
    if rank_and_size()[0] == 0:
        print(f"{config.recipe}, norm {config.norm}, seed {config.seed}: {out}", flush=True)
    return train_until_stopped(config, out, logs)
