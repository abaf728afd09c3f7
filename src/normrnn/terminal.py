"""Streams that escape control characters: every command prints through them.

Names and texts come from untrusted files. `cli.guarded` installs the streams; `PlainConsole` (rich)
and tyro's help write terminal codes of their own and use the stream below.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from normrnn.errors import printable


class EscapingStream:
    """A text stream that escapes control characters before it writes to the stream below."""

    def __init__(self, below: TextIO) -> None:
        self.below = below

    def write(self, text: str) -> int:
        """Write the text with its control characters escaped."""
        self.below.write(printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write every line like `write`."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)


def below(stream: Any) -> TextIO:
    """Return the stream below, which takes terminal codes."""
    return stream.below if isinstance(stream, EscapingStream) else stream


@contextlib.contextmanager
def escaping() -> Iterator[None]:
    """Standard output and standard error escape control characters inside the block."""
    out, err = sys.stdout, sys.stderr
    wrapped: Any = EscapingStream(below(out)), EscapingStream(below(err))
    sys.stdout, sys.stderr = wrapped
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
