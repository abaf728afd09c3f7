"""`normrnn info PATH`."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg


def command(run: Annotated[Positional[Path], arg(metavar="PATH")], all: bool = False) -> None:
    """What a trained network is, how it was trained, what it reaches and how to load it.

    Args:
        run: A run directory, a directory that `normrnn export` made, or one of their files.
        all: Of a run, also its settings and the front matter of its model card.
    """
    from normrnn.deploy.card import info

    print(info(run, settings=all), end="")
