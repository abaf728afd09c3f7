"""Paths as people write them, and files that are there whole or not at all.

What is written here follows no symbolic link at its last name: a directory may be somebody
else's, and a link in it would have us overwrite what it points to.
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
"""Bytes that are read of a file of settings or results at most: config.json and its like."""
ROWS = 1 << 30
"""The same of files with a line for each row, utterance or trial."""
_GROWTH = 100
_SMALL = 1 << 24


def largest_tensors() -> int:
    """Bytes that are read of a file of tensors, or of a text, at most: half of the memory."""
    return min(machine_memory() // 2, 1 << 40)


def largest_unpacked(size: int) -> int:
    """Bytes that a compressed file of `size` bytes may hold: labels and sound shrink to a tenth,
    not to a hundredth, so what holds more was made to fill the memory."""
    return _GROWTH * size + _SMALL


def machine_memory() -> int:
    """Bytes of memory of this machine; very many where that is not known."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 62


def expanded(path: str | Path) -> Path:
    """The path with its ~ resolved; UserError if that user has no home here."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path} does not exist: no home directory of that name") from None


def resolved(path: Path) -> Path:
    """Where a path leads; unlike `Path.resolve`, of links that lead nowhere too."""
    return Path(os.path.realpath(path))


def is_utf8(path: Path) -> bool:
    """Whether the path, made absolute, is UTF-8, as some formats and libraries require."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        return False
    return True


def utf8_name(path: Path, option: str) -> None:
    """UsageError for a name that is not UTF-8."""
    if not is_utf8(path):
        raise UsageError(f"{option} needs a name in UTF-8, not {str(path)!r}")


def open_regular(path: Path) -> BufferedReader:
    """A file to read; a pipe or a device, which could keep a reader waiting, is an OSError."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def file_state(path: Path) -> tuple[int, ...]:
    """Numbers that change whenever the content of a file does; none if it cannot be looked up."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


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
        raise UserError(f"{path} is no UTF-8 text") from None


def is_stream(path: str | Path) -> bool:
    """What a shell opened for us: standard input, or the <(…) of a command."""
    return str(path).startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/"))


def refuse_stream(path: str) -> None:
    """UsageError for data that can be read only once, where several processes are to read it."""
    if is_stream(path):
        raise UsageError(f"{path} can be read once only: save it to a file for several runs")


def following_no_link(path: str, flags: int) -> int:
    """An opener for `open` that follows no symbolic link."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path`, through to the disk, when the block has ended.

    If that fails the old one is kept: a UserError says so.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
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
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror or error}; what was there is kept"
        ) from None


def write_whole(path: Path, content: bytes | bytearray | memoryview) -> None:
    """Replace a file through to the disk; UserError, and the old one kept, if that fails."""
    with replacing(path) as file:
        file.write(content)


def remove_leftovers(folder: Path, *names: str) -> None:
    """Temporary files of killed writers of these files; call it where nobody else writes them."""
    for name in names:
        for leftover in folder.glob(f".{name}.*tmp"):
            with contextlib.suppress(OSError):
                leftover.unlink()
