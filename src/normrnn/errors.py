"""The one exception for what a user can put right, and words that are no error."""

import logging
from functools import cache

# Control characters but for newline and tab, what reverses the order of characters, other line
# separators, and halves of characters.
_STEERING = (
    *(c for c in range(0x20) if chr(c) not in "\n\t"),
    *range(0x7F, 0xA0),
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),
)
_ESCAPES = {c: repr(chr(c))[1:-1] for c in _STEERING}


class UserError(Exception):
    """A mistake or mishap that a person can act on; the command line prints it as one sentence.

    `code` is the exit code: 2 for a wrong call, 1 for anything found while working.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class UsageError(UserError):
    """A wrong call: exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=2)


@cache
def notice(message: str) -> None:
    """Say something once, on standard error unless the program that uses us logs otherwise."""
    logging.getLogger("normrnn").warning(printable(message))


def printable(text: str) -> str:
    r"""Escape the characters by which text could control a terminal; newlines and tabs stay.

    >>> printable("a\x1b[2Jb \ud800\n")
    'a\\x1b[2Jb \\ud800\n'
    """
    return text.translate(_ESCAPES)
