"""Locks between processes; the system releases them when the holder dies."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from normrnn.files import open_regular


@contextlib.contextmanager
def exclusive(path: Path, busy: Exception) -> Iterator[None]:
    """Hold the lock file inside the block; raise `busy` if another process holds it.

    No symbolic link is followed, and the file stays. Waits longer than `is_held` takes, so that
    asking does not get in the way.
    """
    lock = FileLock(path, timeout=0.3, poll_interval=0.02, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise busy from None
    try:
        yield
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Whether a process holds the lock file; takes no exclusive lock and creates no file."""
    try:
        import fcntl

        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    return False
