"""Control characters escaped in everything that is printed.

Names and texts come from untrusted files. `cli.guarded` installs the streams; tyro's help writes
terminal codes of its own and uses the stream below.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

# Control characters except newline and tab, bidirectional controls, line separators, surrogates.
_STEERING = (
    *(c for c in range(0x20) if chr(c) not in "\n\t"),
    *range(0x7F, 0xA0),
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),
)
_ESCAPES = {c: repr(chr(c))[1:-1] for c in _STEERING}


def printable(text: str) -> str:
    r"""Escape the characters by which text could control a terminal; newlines and tabs stay.

    >>> printable("a\x1b[2Jb \ud800\n")
    'a\\x1b[2Jb \\ud800\n'
    """
    return text.translate(_ESCAPES)


def one_line(text: str) -> str:
    r"""Escape everything that is not printable, line breaks and tabs too.

    >>> one_line("a\nb")
    'a\\nb'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


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
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)


def below(stream: Any) -> TextIO:
    """Return the stream below, which takes terminal codes."""
    return stream.below if isinstance(stream, EscapingStream) else stream


@contextlib.contextmanager
def escaping() -> Iterator[None]:
    """Standard output and standard error escape control characters inside the block."""
    out: Any = EscapingStream(below(sys.stdout))
    err: Any = EscapingStream(below(sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield
