"""Kaldi's archives and tables.

Nothing that is read is executed: only binary matrices and int32 vectors are accepted, and entries
of tables are names of files, never commands. Sizes in headers are checked against the size of the
file before memory is allocated. No message repeats the content of an archive.
"""

import contextlib
import os
import re
import struct
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from normrnn.errors import UserError
from normrnn.files import open_regular, read_text

_PLAIN = {b"\0BFM": "<f4", b"\0BDM": "<f8"}
_COMPRESSED = {b"\0BCM": ("u1", 65535), b"\0BCM2": ("<u2", 65535), b"\0BCM3": ("u1", 255)}
"""Kind -> type of the codes, steps between the smallest and the largest value."""
_SHAPE = struct.Struct("<bibi")  # size of an int, rows, size of an int, columns
_SCALE = struct.Struct("<ffii")  # smallest value, range, rows, columns
_VECTOR = struct.Struct("<2sbi")  # mark of binary data, size of an int, length
_ELEMENT = np.dtype([("size", "i1"), ("value", "<i4")])
_LONGEST_KEY = 1 << 12


class Unusable(UserError):  # noqa: N818  a property of an utterance
    """Why one utterance cannot be used; the others can."""


def write_matrix(file: IO[bytes], key: str, matrix: NDArray[np.floating]) -> int:
    """Append a matrix (T, D); return the offset for the scp file."""
    file.write(f"{key} ".encode())
    offset = file.tell()
    rows, columns = matrix.shape
    file.write(b"\0BFM " + _SHAPE.pack(4, rows, 4, columns))
    file.write(np.ascontiguousarray(matrix, dtype="<f4").tobytes())
    return offset


def write_vector(file: IO[bytes], key: str, vector: NDArray[np.integer]) -> int:
    """Append an int32 vector (T,); return the offset for the scp file."""
    file.write(f"{key} ".encode())
    offset = file.tell()
    body = np.empty(len(vector), dtype=_ELEMENT)
    body["size"], body["value"] = 4, vector
    file.write(_VECTOR.pack(b"\0B", 4, len(vector)) + body.tobytes())
    return offset


def read_matrix(path: Path, offset: int = 0) -> NDArray[np.float32]:
    """Read a matrix (T, D): float, double or compressed. Unusable for anything else."""
    with _opened(path, offset) as file:
        kind = file.read(6).partition(b" ")[0]
        file.seek(offset + len(kind) + 1)
        if kind in _PLAIN:
            code = np.dtype(_PLAIN[kind])
            _, rows, _, columns = _SHAPE.unpack(file.read(_SHAPE.size))
            low = span = 0.0
        elif kind in _COMPRESSED:
            code = np.dtype(_COMPRESSED[kind][0])
            low, span, rows, columns = _SCALE.unpack(file.read(_SCALE.size))
        else:
            raise Unusable(f"{path} has no binary matrix at byte {offset}")
        length = rows * columns * code.itemsize + (8 * columns if kind == b"\0BCM" else 0)
        if min(rows, columns) <= 0 or length > _left(file):
            raise Unusable(f"{path} is damaged: {rows} rows and {columns} columns at byte {offset}")
        body = file.read(length)
    with np.errstate(over="ignore", invalid="ignore"):  # callers refuse infinities
        if kind in _PLAIN:
            return np.frombuffer(body, code).reshape(rows, columns).astype(np.float32)
        return _decompressed(body, kind, np.float32(low), np.float32(span), (rows, columns))


def read_vector(path: Path, offset: int) -> NDArray[np.int32]:
    """Read a binary int32 vector (T,)."""
    with _opened(path, offset) as file:
        return _vector(file, path)


def read_vectors(path: Path) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """Yield all vectors of a binary archive."""
    with _opened(path) as file:
        while _left(file):
            key = b""
            while len(key) < _LONGEST_KEY and (byte := file.read(1)) not in (b" ", b""):
                key += byte
            yield key.decode("utf-8", "replace"), _vector(file, path)


def _vector(file: BufferedReader, path: Path) -> NDArray[np.int32]:
    mark, size, length = _VECTOR.unpack(file.read(_VECTOR.size))
    if (mark, size) != (b"\0B", 4) or not 0 <= length * _ELEMENT.itemsize <= _left(file):
        raise Unusable(f"{path} is damaged, or not a binary archive of int vectors")
    elements = np.frombuffer(file.read(length * _ELEMENT.itemsize), dtype=_ELEMENT)
    if (elements["size"] != 4).any():
        raise Unusable(f"{path} is damaged: not a vector of int32")
    return elements["value"].astype(np.int32)


@contextlib.contextmanager
def _opened(path: Path, offset: int = 0) -> Iterator[BufferedReader]:
    """Open a file at a byte; Unusable if it cannot be read, or ends in a header."""
    try:
        with open_regular(path) as file:
            file.seek(offset)
            yield file
    except OSError as error:
        raise Unusable(f"{path} cannot be read: {error.strerror}") from None
    except struct.error:
        raise Unusable(f"{path} is damaged: an object is cut off") from None


def _left(file: BufferedReader) -> int:
    return os.fstat(file.fileno()).st_size - file.tell()


def _decompressed(
    body: bytes, kind: bytes, low: np.float32, span: np.float32, shape: tuple[int, int]
) -> NDArray[np.float32]:
    code, last = _COMPRESSED[kind]
    steps = np.float32(last)
    if kind != b"\0BCM":
        return low + np.frombuffer(body, code).reshape(shape).astype(np.float32) * span / steps
    # A column is three straight lines between its percentiles 0, 25, 75 and 100.
    rows, columns = shape
    corners = np.frombuffer(body, "<u2", 4 * columns).astype(np.float32)
    p0, p25, p75, p100 = (low + corners * span / steps).reshape(-1, 4, 1).swapaxes(0, 1)
    codes = np.frombuffer(body, code, offset=8 * columns).astype(np.float32)
    codes = codes.reshape(columns, rows)
    below = p0 + (p25 - p0) * codes * np.float32(1 / 64)
    middle = p25 + (p75 - p25) * (codes - 64) * np.float32(1 / 128)
    above = p75 + (p100 - p75) * (codes - 192) * np.float32(1 / 63)
    values = np.where(codes <= 64, below, np.where(codes <= 192, middle, above))
    return np.ascontiguousarray(values.T)


def read_table(path: Path) -> dict[str, str]:
    """Read an scp, utt2spk or text file: key -> rest of the line; a repeated key is an error."""
    table: dict[str, str] = {}
    try:
        lines = read_text(path).split("\n")  # Kaldi's only line end
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        key, _, rest = line.strip().replace("\t", " ").partition(" ")
        if key in table:
            raise UserError(f"{path} line {number} has {key} a second time")
        if key:
            table[key] = rest.strip()
    return table


def locate(target: str, folder: Path) -> tuple[Path, int]:
    """Return the archive and offset of an scp entry `PATH:OFFSET`, or `PATH` of a single object.

    Where PATH is not there, as after a move, it is looked for in `folder`, that of the scp file.
    """
    match = re.fullmatch("(.+):([0-9]{1,18})", target)
    path, offset = (Path(match[1]), int(match[2])) if match else (Path(target), 0)
    if any(mark in target for mark in "|\0") or target in ("", "-") or target.endswith("]"):
        raise UserError(
            f"a table of {folder} names no file ({target!r}): commands and ranges of rows are not"
            " read here; copy-feats writes an archive"
        )
    choices = (path, folder / path, folder / path.name)
    return next((choice for choice in choices if choice.is_file()), path), offset
