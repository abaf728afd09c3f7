"""Rich console without markup and without control codes from files."""

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from normrnn.terminal import below, printable


class PlainConsole(Console):
    """Prints text literally, with control characters escaped."""

    def __init__(self, **options: Any) -> None:
        plain: dict[str, Any] = dict.fromkeys(("highlight", "markup", "emoji"), False)
        plain["file"] = below(sys.stderr if options.get("stderr") else sys.stdout)
        plain["force_jupyter"] = False  # a display per line otherwise
        super().__init__(**{**plain, **options})

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        """Render with control characters of the text escaped; rich's own are kept."""
        for segment in super().render(*args, **options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Raise, as every other write does."""
        raise BrokenPipeError
