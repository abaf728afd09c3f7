"""Paths, limits on what is read, atomic writes, locks and checksums.

Writes do not follow a symbolic link at the last component of a path: in another user's directory
a link could make us overwrite its target.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from normrnn.errors import UsageError, UserError

BLANK = "0" * 64
_FIELD = rb'"sha256": ?"([0-9a-f]{64})"'
SETTINGS = 1 << 26  # limit in bytes for files of settings or results, as config.json
ROWS = 1 << 30  # limit for files with a line for each row, utterance or trial


def largest_tensors() -> int:
    """Limit for files of tensors and texts: half of the memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


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
        why = error.strerror or error
        raise UserError(f"{path} cannot be written: {why}; the old file is kept") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_whole(path: Path, *content: bytes | bytearray | memoryview) -> None:
    """Replace a file atomically; UserError, with the old file kept, if that fails."""
    with replacing(path) as file:
        file.writelines(content)


def remove_leftovers(folder: Path, locked: Container[str]) -> None:
    """Remove the temporary files of killed writers, for the holder of the directory's lock: of the
    files that are written under the lock, and of others if a day old."""
    for path in folder.glob(".*.tmp"):
        if name := re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.tmp", path.name):
            with contextlib.suppress(OSError):
                if name[1] in locked or time.time() - path.lstat().st_mtime > 86_400:
                    path.unlink()


# Locks between processes; the system releases them when the holder dies.


@contextlib.contextmanager
def exclusive(path: Path, busy: Exception) -> Iterator[None]:
    """Hold the lock file inside the block; raise `busy` if another process holds it.

    No symbolic link is followed, and the file stays. Waits longer than `is_held` takes.
    """
    from filelock import FileLock, Timeout

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
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


# Checksums: a field "sha256" holds the hash of the whole file with zeros in its place, so that
# damage anywhere, the field included, is recognised. It is the first field of a JSON file, and in
# the header of a safetensors file.


def _find_field(content: bytes | bytearray) -> re.Match[bytes] | None:
    end = 8 + int.from_bytes(content[:8], "little")
    if content[8:9] == b"{" and end <= len(content):
        return re.compile(_FIELD).search(content, 8, end)
    return re.match(rb"\[?\s*\{\s*" + _FIELD, content)


def seal(content: bytearray) -> str:
    """Write the hash into its field, and return it."""
    field = _find_field(content)
    assert field is not None
    digest = _hash(content, *field.span(1))
    content[field.start(1) : field.end(1)] = digest
    return digest.decode()


def is_sealed(content: bytes, path: Path) -> bool:
    """Whether there is a hash; UserError if it is wrong."""
    field = _find_field(content)
    if field and field[1] != _hash(content, *field.span(1)):
        raise UserError(f"{path} is damaged: wrong checksum")
    return field is not None


def sealed(text: str) -> bytes:
    """Return a text with its hash filled in."""
    content = bytearray(text.encode())
    seal(content)
    return bytes(content)


def sealed_json(values: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> bytes:
    """Return a JSON object, or a list of at least one, with a hash as the first field."""
    if isinstance(values, Mapping):
        content: Any = {"sha256": BLANK, **values}
    else:
        content = [{"sha256": BLANK, **values[0]}, *values[1:]]
    return sealed(json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path, kind: type = dict) -> tuple[Any, bool]:
    """Return a JSON object, or with `list` a list of them, without hash, and whether it had one.

    FileNotFoundError if the file does not exist; UserError if it is damaged or cannot be read.
    """
    try:
        content = read_regular(path)
        has_hash = is_sealed(content, path)
        values = json.loads(content)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: not JSON") from None
    objects = values if kind is list and isinstance(values, list) else [values]
    if not isinstance(values, kind) or not all(isinstance(one, dict) for one in objects):
        raise UserError(f"{path} is damaged: not a JSON {kind.__name__}")
    if objects:
        objects[0].pop("sha256", None)
    return values, has_hash


def read_sealed_json(path: Path) -> dict[str, Any]:
    """Return a JSON object with a hash, without it; errors as above, UserError for no hash."""
    values, has_hash = read_json(path)
    if not has_hash:
        raise UserError(f"{path} is damaged: its checksum is missing")
    return values


def _hash(content: bytes | bytearray, start: int, stop: int) -> bytes:
    view = memoryview(content)
    digest = hashlib.sha256(view[:start])
    digest.update(BLANK.encode())
    digest.update(view[stop:])
    return digest.hexdigest().encode()
