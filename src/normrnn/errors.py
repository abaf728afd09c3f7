"""Errors that a user can act on, and notices."""

import logging
from functools import cache

from normrnn.terminal import printable


class UserError(Exception):
    """An error that a user can act on; the command line prints it as one line.

    `code` is the exit code: 1 unless a subclass has another.
    """

    code = 1


class UsageError(UserError):
    """Wrong arguments."""

    code = 2


class BusyError(UserError):
    """Another process trains in this directory."""

    code = 4


@cache
def notice(message: str) -> None:
    """Log a warning once; on standard error unless logging is configured otherwise."""
    logging.getLogger("normrnn").warning(printable(message))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, by the words of Python, torch, C++ or the dynamic linker."""
    words = ("allocate memory", "bad_alloc", "failed to map segment", "can't start new thread")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)
