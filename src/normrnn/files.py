"""Paths, limits on what is read, and atomic writes.

Writes do not follow a symbolic link at the last component of a path: in another user's directory
a link could make us overwrite its target.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO

from normrnn.errors import UsageError, UserError

SETTINGS = 1 << 26
"""Limit in bytes for files of settings or results, as config.json."""
ROWS = 1 << 30
"""Limit for files with a line for each row, utterance or trial."""


def largest_tensors() -> int:
    """Limit for files of tensors and texts: half of the memory."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # unknown
        memory = 1 << 41
    return memory // 2


def largest_unpacked(size: int) -> int:
    """Limit for the content of a compressed file of `size` bytes: a hundred times as much, since
    labels and sound compress to about a tenth."""
    return 100 * size + (1 << 24)


def expanded(path: str | Path) -> Path:
    """Expand ~ in a path; UserError if that user has no home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path} does not exist: no home directory of that name") from None


def resolved(path: Path) -> Path:
    """Resolve a path; unlike `Path.resolve`, also through links in a loop."""
    return Path(os.path.realpath(path))


def utf8_name(path: Path, option: str) -> None:
    """Raise UsageError for a name that is not UTF-8, as some libraries require."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{option} needs a name in UTF-8, not {str(path)!r}") from None


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; OSError for a pipe or a device, which could block."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, limit: int = SETTINGS) -> bytes:
    """Read a whole file; OSError for a pipe or a device, or a file of more than `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            reason = f"it has {size:,} bytes, more than the {limit:,} that are read of such a file"
            raise OSError(errno.EFBIG, reason, str(path))
        return file.read()


def read_text(path: Path) -> str:
    """Read a whole text file, without its byte order mark; OSError as above, UserError for bytes
    that are not UTF-8."""
    try:
        return read_regular(path, ROWS).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None


def following_no_link(path: str, flags: int) -> int:
    """Opener for `open` that follows no symbolic link."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that replaces `path` atomically, flushed to the disk, when the block ends.

    If that fails the old file is kept and UserError is raised.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", opener=following_no_link) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror or error}; the old file is kept"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_whole(path: Path, *content: bytes | bytearray | memoryview) -> None:
    """Replace a file atomically; UserError, with the old file kept, if that fails."""
    with replacing(path) as file:
        file.writelines(content)


def remove_leftovers(folder: Path, *names: str) -> None:
    """Remove temporary files that killed writers of these files left; hold their lock."""
    for name in names:
        for leftover in folder.glob(f".{name}.*tmp"):
            with contextlib.suppress(OSError):
                leftover.unlink()
