"""The terminal as commands write to it."""

from typing import Any

from rich.console import Console


class PlainConsole(Console):
    """Paths and settings are shown as they are, not read as markup; a closed pipe is for
    `cli.guarded` to answer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """As every other write does it."""
        raise BrokenPipeError
