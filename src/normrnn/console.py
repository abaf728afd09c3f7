"""Rich console without markup and without control codes from files."""

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from normrnn.errors import printable
from normrnn.terminal import below


class PlainConsole(Console):
    """Prints text literally, with control characters escaped."""

    def __init__(self, **options: Any) -> None:
        stream = below(sys.stderr if options.get("stderr") else sys.stdout)
        super().__init__(
            **{
                "file": stream,
                "highlight": False,
                "markup": False,
                "emoji": False,
                "force_jupyter": False,  # a display per line otherwise
                **options,
            }
        )

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        """Render with control characters of the text escaped; rich's own are kept."""
        for segment in super().render(*args, **options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; into a pipe or a file without blanks at the ends of lines."""
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write("\n".join(line.rstrip(" ") for line in captured.get().split("\n")))

    def on_broken_pipe(self) -> None:
        """Raise, as every other write does."""
        raise BrokenPipeError
