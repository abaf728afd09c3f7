"""Errors that a user can act on, notices, and escaping of control characters."""

import logging
from functools import cache

# Control characters except newline and tab, bidirectional controls, line separators, surrogates.
_STEERING = (
    *(c for c in range(0x20) if chr(c) not in "\n\t"),
    *range(0x7F, 0xA0),
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),
)
_ESCAPES = {c: repr(chr(c))[1:-1] for c in _STEERING}


class UserError(Exception):
    """An error that a user can act on; the command line prints it as one line.

    `code` is the exit code: 2 for wrong arguments, 1 otherwise.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class UsageError(UserError):
    """Wrong arguments: exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=2)


@cache
def notice(message: str) -> None:
    """Log a warning once; on standard error unless logging is configured otherwise."""
    logging.getLogger("normrnn").warning(printable(message))


def printable(text: str) -> str:
    r"""Escape the characters by which text could control a terminal; newlines and tabs stay.

    >>> printable("a\x1b[2Jb \ud800\n")
    'a\\x1b[2Jb \\ud800\n'
    """
    return text.translate(_ESCAPES)
