"""Kaldi's archives: matrices and int32 vectors, and the tables that point at them.

Nothing that is read is executed: `matrices` lists the accepted objects, and `locate` refuses
commands. No message repeats the content of an archive.

An scp line is `KEY PATH:OFFSET`. Kaldi's programs open PATH as it stands, so absolute paths are
written. `locate` looks for an archive of that name beside the scp file first, and readers check the
key before the offset: a directory that was moved or copied reads its own archives.
"""

import gzip
import os
import re
import struct
import zlib
from collections.abc import Iterator
from io import BufferedIOBase, BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normrnn.errors import UserError
from normrnn.files import largest_unpacked, open_regular, read_text
from normrnn.speech.matrices import BINARY, Unusable, find_matrix

_HEAD = struct.Struct("<bibi")  # size of an int, rows, size of an int, columns
CHECKSUMS = "checksums"
"""File with the hashes of the objects in the archives of a prepared directory."""
_ROW = np.dtype([("size", "i1"), ("value", "<i4")])
_CHUNK = 1 << 20
# Limits for gzipped files, whose content may be far larger than the file.
_LONGEST_KEY = 1 << 12
_LONGEST_LINE = 1 << 24


class Entry(NamedTuple):
    """Position of the object of a key: a file, and the offset after the key (None: no key)."""

    path: Path
    offset: int | None
    named: bool = False
    """Whether a foreign table names this file: it may have another key in it, as after Kaldi's
    copy_data_dir.sh."""


def write_matrix(file: IO[bytes], key: str, matrix: NDArray[np.floating]) -> int:
    """Append a matrix (T, D); return the offset for the scp file."""
    file.write(f"{key} ".encode())
    offset = file.tell()
    rows, columns = matrix.shape
    file.write(BINARY + b"FM " + _HEAD.pack(4, rows, 4, columns))
    file.write(np.ascontiguousarray(matrix, dtype="<f4").tobytes())
    return offset


def write_vector(file: IO[bytes], key: str, vector: NDArray[np.integer]) -> int:
    """Append an int32 vector (T,); return the offset for the scp file."""
    file.write(f"{key} ".encode())
    offset = file.tell()
    body = np.empty(len(vector), dtype=_ROW)
    body["size"], body["value"] = 4, vector
    file.write(BINARY + struct.pack("<bi", 4, len(vector)) + body.tobytes())
    return offset


def read_matrix(
    entry: Entry, key: str, start: int = 0, stop: int | None = None
) -> NDArray[np.float32]:
    """Read rows start..stop (T, D); of an uncompressed matrix only these come from disk."""
    with _open(entry, key) as file:
        return find_matrix(file, key, entry.path).read(start, stop)


def count_rows(entry: Entry, key: str) -> int:
    """Return the number of rows of a matrix from its header."""
    with _open(entry, key) as file:
        return find_matrix(file, key, entry.path).rows


def read_vector(
    entry: Entry, key: str, start: int = 0, stop: int | None = None
) -> NDArray[np.int32]:
    """Read elements start..stop of a binary int32 vector."""
    with _open(entry, key) as file:
        if file.read(2) != BINARY:
            raise Unusable(f"{entry.path} holds no binary int vector for {key}")
        return _vector(file, key, entry.path, start, stop)


def read_vectors(path: Path) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """Yield all int vectors of an archive: binary or text, gzipped or not."""
    try:
        with open_regular(path) as raw, _unpacked(raw, path) as file:
            while True:
                key, ended = _key(file, path)
                if not key:
                    return
                first = b"\n" if ended else file.read(1)
                if first != BINARY[:1]:
                    line = first if first == b"\n" else first + file.readline(_LONGEST_LINE)
                    if len(line) > _LONGEST_LINE:
                        raise UserError(
                            f"{path} is not an archive: {key} has a line without an end"
                        )
                    yield key, _numbers(line, key, path)
                elif file.read(1) == BINARY[1:]:
                    yield key, _vector(file, key, path)
                else:
                    raise Unusable(f"{path} is damaged at {key}")
    except (EOFError, OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read: {reason}") from None


def read_table(path: Path) -> dict[str, str]:
    """Read an scp, utt2spk or text file: key -> rest of the line; a repeated key is an error."""
    table: dict[str, str] = {}
    try:
        lines = read_text(path).split("\n")  # Kaldi's only line end
    except FileNotFoundError:
        raise UserError(f"{path.parent} lacks {path.name}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        key, _, rest = line.strip().partition(" ") if "\t" not in line else _split(line)
        if not key:
            continue
        if key in table:
            raise UserError(f"{path} line {number} has {key} a second time")
        table[key] = rest.strip()
    return table


def whole_number(text: str) -> int | None:
    """Return the number of up to 18 plain digits; None for anything else."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def is_command(target: str) -> bool:
    """Return whether Kaldi would run a command for this scp entry."""
    name, _, digits = target.rpartition(":")
    name = (name if digits.isdigit() else target).strip()
    return name.startswith("|") or name.endswith("|")


def locate(target: str, folder: Path) -> Entry:
    """Return the archive and offset of an scp entry `PATH` or `PATH:OFFSET` in `folder`."""
    if is_command(target):
        raise Unusable(
            f"an scp file of {folder} asks for a command ({target}): not run here"
            " (prepare kaldi --allow-pipes runs those that end in a bar)"
        )
    if target.endswith("]"):
        raise Unusable(f"{target} is a range of rows: not read here, copy-feats writes it out")
    if target in ("", "-") or "\0" in target:
        raise Unusable(f"an scp file of {folder} names no file: {target!r}")
    name, colon, digits = target.rpartition(":")
    offset = whole_number(digits) if colon else None
    path = Path(target if offset is None else name)
    # As Kaldi opens it, relative to the scp file, beside it. In a prepared directory, whose content
    # is verified, first beside it: the directory may be a copy.
    choices = [path, folder / path, folder / path.name]
    own = offset is not None and (folder / CHECKSUMS).is_file()
    if own:
        choices = [folder / path.name, path, folder / path]
    found = next((choice for choice in choices if choice.is_file()), path)
    return Entry(found, offset, not own and found == path)


def _split(line: str) -> tuple[str, str, str]:
    key, *rest = line.split(None, 1) or [""]
    return key, " ", rest[0] if rest else ""


def _open(entry: Entry, key: str) -> BufferedIOBase:
    """Open the file at the object of this key."""
    try:
        file = open_regular(entry.path)
    except OSError as error:
        raise Unusable(f"{entry.path} cannot be read: {error.strerror}") from None
    if entry.offset is not None:
        name = b" " if entry.named else f"{key} ".encode()
        file.seek(max(entry.offset - len(name), 0))
        if file.read(len(name)) != name:
            file.close()
            raise Unusable(f"{entry.path} does not hold {key} at byte {entry.offset}")
    return file


def _unpacked(raw: BufferedIOBase, path: Path) -> BufferedIOBase:
    if path.suffix != ".gz":
        return raw
    return BufferedReader(_Bounded(raw, largest_unpacked(os.fstat(raw.fileno()).st_size)))


class _Bounded(RawIOBase):
    """A gzipped file that raises OSError after `limit` unpacked bytes."""

    def __init__(self, raw: BufferedIOBase, limit: int) -> None:
        self._file, self._left, self._limit = gzip.GzipFile(fileobj=raw), limit, limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        count = self._file.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise OSError(f"it unpacks to more than {self._limit:,} bytes, too many for its size")
        return count


def _vector(
    file: BufferedIOBase, key: str, path: Path, start: int = 0, stop: int | None = None
) -> NDArray[np.int32]:
    head = file.read(5)
    if len(head) < 5 or head[0] != 4:
        raise Unusable(f"{path} holds no int vector for {key}")
    (length,) = struct.unpack("<i", head[1:])
    if length < 0:
        raise Unusable(f"{path} is damaged at {key}: a vector of {length} numbers")
    first, last, _ = slice(start, stop).indices(length)
    if first:
        file.seek(first * _ROW.itemsize, 1)
    body = _exactly(file, max(last - first, 0) * _ROW.itemsize)
    if body is None:
        raise Unusable(f"{path} ends in the middle of {key}")
    rows = np.frombuffer(body, dtype=_ROW)
    if (rows["size"] != 4).any():
        raise Unusable(f"{path} is damaged at {key}")
    return rows["value"].astype(np.int32)


def _exactly(file: BufferedIOBase, size: int) -> bytes | None:
    """Read `size` bytes in chunks, because a header may be wrong; None if there are fewer."""
    parts: list[bytes] = []
    while size > 0 and (part := file.read(min(size, _CHUNK))):
        parts.append(part)
        size -= len(part)
    return None if size else b"".join(parts)


def _key(file: BufferedIOBase, path: Path) -> tuple[str, bool]:
    """Return the next key, empty at the end of the file, and whether it ended the line."""
    name = bytearray()
    while byte := file.read(1):
        if byte in b" \t\n":
            if name:
                return name.decode("utf-8", "replace"), byte == b"\n"
            continue
        name += byte
        if len(name) > _LONGEST_KEY:
            raise UserError(
                f"{path} is not an archive: it has a key of over {_LONGEST_KEY:,} bytes"
            )
    return name.decode("utf-8", "replace"), True


def _numbers(line: bytes, key: str, path: Path) -> NDArray[np.int32]:
    words = line.split()
    if words[:1] == [b"["] and words[-1] == b"]":  # as kaldiio writes them
        words = words[1:-1]
    try:
        return np.array([int(word) for word in words], dtype=np.int32)
    except (ValueError, OverflowError):
        raise UserError(f"{path} holds no int vector for {key}") from None
