"""Locks between processes: held by one, given up by the system when that one dies."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from normrnn.files import open_regular


def try_lock(path: Path) -> FileLock | None:
    """The lock file `path`, taken at once; None if another process holds it.

    No symbolic link is followed, and the file stays when the lock is released.
    """
    lock = FileLock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


@contextlib.contextmanager
def exclusive(path: Path, busy: Exception) -> Iterator[None]:
    """Holds the lock file `path` inside; raises `busy` if another process does."""
    lock = try_lock(path)
    if lock is None:
        raise busy
    try:
        yield
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Whether a process holds the lock file. Asking leaves no file and takes no exclusive lock."""
    try:
        import fcntl

        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    return False
