"""Unexpected errors: one line for the user, the stack trace in a private file."""

import os
import sys
import tempfile
import traceback
from pathlib import Path

from normrnn.version import __version__


def report(error: BaseException, arguments: list[str]) -> str:
    """Write the stack trace to a file and return the message that names it."""
    what = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    text = "".join(traceback.format_exception(error))
    about = f"normrnn {__version__}, Python {sys.version.split()[0]}\n{arguments}\n\n{text}"
    path = Path(tempfile.gettempdir()) / f"normrnn-error-{os.getpid()}.txt"
    try:
        path.unlink(missing_ok=True)
        with open(path, "x", encoding="utf-8", errors="replace", opener=_private) as f:
            f.write(about)
    except OSError:
        return f"unexpected error ({what}); no file could be written for the details"
    return f"unexpected error ({what}); the details are in {path}"


def _private(path: str, flags: int) -> int:
    """Open a new file that only this user can read: arguments may hold a password."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, by the words of Python, torch, C++ or the dynamic linker."""
    words = ("allocate memory", "bad_alloc", "failed to map segment", "can't start new thread")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)
