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
    logging.getLogger("normrnn").warning(encodable(message))


def encodable(text: str) -> str:
    r"""The same with what is no character, from a file or in a file's name, as an escape.

    >>> encodable("half \ud800")
    'half \\ud800'
    """
    return text.encode("utf-8", "backslashreplace").decode()
