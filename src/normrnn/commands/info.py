"""`normrnn info PATH`."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg


def info(path: Annotated[Positional[Path], arg(metavar="PATH")]) -> None:
    """What a trained network is, how it was trained, what it reaches and how to load it.

    Args:
        path: A run directory, a directory that `normrnn export` made, or one of their files.
    """
    from normrnn.deploy.card import info

    print(info(path), end="")
