"""The one exception for what a user can put right, and words that are no error."""

import logging
from functools import cache


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
    r"""For a terminal: what stands in somebody's file, or names it, cannot steer it or be half a
    character. Lines and tabs stay, the rest is shown as escapes.

    >>> printable("a\x1b[2Jb \ud800\n")
    'a\\x1b[2Jb \\ud800\n'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
