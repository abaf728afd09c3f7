"""`normrnn train RECIPE`."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from normrnn.commands.options import parse, split_recipe
from normrnn.config.base import Config
from normrnn.engine.launch import rank_and_size
from normrnn.recipes import RECIPES


def run(arguments: list[str]) -> int:
    """Train a recipe, or go on with a run; started by torchrun, with the others."""
    return said_once(lambda: _run(arguments))


def said_once(work: Callable[[], int]) -> int:
    """Of several processes that train together one alone says why they end."""
    try:
        return work()
    except Exception as error:
        if rank_and_size()[1] > 1 and not _may_speak(error):
            return getattr(error, "code", 1)
        raise


def _may_speak(error: BaseException) -> bool:
    from normrnn.engine.ranks import may_speak

    return may_speak(error)


def _run(arguments: list[str]) -> int:
    default, rest = _named(arguments)
    resumed = Path(arguments[0]) if arguments[0] not in RECIPES else None

    def options(
        config: Annotated[Config, arg(name="")] = default,
        out: Annotated[Path | None, arg(metavar="DIR")] = resumed,
        tensorboard: bool = False,
    ) -> tuple[Config, Path | None, bool]:
        """Train a recipe. Starting again in the same directory resumes it.

        Args:
            config: The experiment.
            out: Run directory; runs/RECIPE-NORM-SEED unless given.
            tensorboard: Also write the rows for tensorboard, in the run directory.
        """
        return config, out, tensorboard

    config, out, tensorboard = parse(options, f"train {arguments[0]}", rest)
    out = out or Path("runs") / f"{config.recipe}-{config.norm}-{config.seed}"
    if rank_and_size()[0] == 0:
        print(f"{config.recipe}, norm {config.norm}, seed {config.seed}: {out}", flush=True)
    return train_and_report(config, out, tensorboard)


def _named(arguments: list[str]) -> tuple[Config, list[str]]:
    """Return the config of the recipe or run directory named first, and the other arguments."""
    place = Path(arguments[0]) if arguments else None
    if place is None or arguments[0] in RECIPES or not place.is_dir():
        return split_recipe("train", arguments, "normrnn train RUN_DIR [OPTIONS] resumes a run")
    from normrnn.runs.store import RunDirectory

    return RunDirectory(place).config(), arguments[1:]


def train_and_report(config: Config, out: Path, tensorboard: bool = False) -> int:
    """Train with the display that suits the output; 130 when interrupted."""
    from normrnn.engine.display import LiveDisplay, PlainDisplay
    from normrnn.engine.interrupt import Interrupted
    from normrnn.engine.start import train
    from normrnn.engine.tensorboard import TensorBoard, beside

    keeps = config.normalisation.keeps_statistics
    shown = LiveDisplay if sys.stdout.isatty() else PlainDisplay
    display = partial(shown, statistics=keeps)
    board = TensorBoard(out) if tensorboard and rank_and_size()[0] == 0 else None
    try:
        train(config, out, beside(display, board) if board else display)
        if board:
            board.complete()
    except Interrupted as error:
        if _may_speak(error):
            text = f"stopped; the same command goes on from the checkpoint in {out}"
            print(text, file=sys.stderr, flush=True)
        return 130
    finally:
        if board:
            board.close()
    return 0
