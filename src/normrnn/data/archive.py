"""Kaldi's archives: float32 matrices and int32 vectors, and the tables that point at them.

What is written here, and what Kaldi writes by default, is read here, slices without the rest;
compressed, double and text matrices go through kaldiio.

An scp line is `KEY PATH:OFFSET`. Kaldi's programs open PATH as it stands, so absolute paths are
written. A reader here looks for an archive of that name beside the scp file first, and checks the
key in front of the offset: a directory that was moved or copied reads its own archives.
"""

import gzip
import struct
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normrnn.data.extras import speech_extra
from normrnn.errors import UserError

_BINARY = b"\0B"
_MATRIX = b"FM "
_HEAD = struct.Struct("<bibi")  # size of an int, rows, size of an int, columns
_ROW = np.dtype([("size", "i1"), ("value", "<i4")])


class Unusable(UserError):  # noqa: N818  said of an utterance, not of the program
    """One utterance cannot be used, and why; the others go on."""


class Entry(NamedTuple):
    """Where the object of a key lies: a file, and the position behind the key (None: alone)."""

    path: Path
    offset: int | None


def write_matrix(file: IO[bytes], key: str, matrix: NDArray[np.floating]) -> int:
    """Append a matrix (T, D); returns the offset for the scp file."""
    file.write(f"{key} ".encode())
    offset = file.tell()
    rows, columns = matrix.shape
    file.write(_BINARY + _MATRIX + _HEAD.pack(4, rows, 4, columns))
    file.write(np.ascontiguousarray(matrix, dtype="<f4").tobytes())
    return offset


def write_vector(file: IO[bytes], key: str, vector: NDArray[np.integer]) -> int:
    """Append an int32 vector (T,); returns the offset for the scp file."""
    file.write(f"{key} ".encode())
    offset = file.tell()
    body = np.empty(len(vector), dtype=_ROW)
    body["size"], body["value"] = 4, vector
    file.write(_BINARY + struct.pack("<bi", 4, len(vector)) + body.tobytes())
    return offset


def read_matrix(
    entry: Entry, key: str, start: int = 0, stop: int | None = None
) -> NDArray[np.float32]:
    """Rows start..stop (T, D); of the usual kind only these are read from disk."""
    with _open(entry, key) as file:
        shape = _shape(file)
        if shape is None:
            return _through_kaldiio(entry)[start:stop]
        rows, columns = shape
        first, last, _ = slice(start, stop).indices(rows)
        wanted = max(last - first, 0) * columns
        file.seek(first * columns * 4, 1)
        body = file.read(wanted * 4)
    if len(body) < wanted * 4:
        raise Unusable(f"{entry.path} ends in the middle of {key}")
    return np.frombuffer(body, dtype="<f4").reshape(-1, columns).astype(np.float32)


def matrix_shape(entry: Entry, key: str) -> tuple[int, int]:
    """Rows and columns; of the usual kind only the header is read from disk."""
    with _open(entry, key) as file:
        shape = _shape(file)
    if shape is None:
        rows, columns = _through_kaldiio(entry).shape
        return rows, columns
    return shape


def read_vector(
    entry: Entry, key: str, start: int = 0, stop: int | None = None
) -> NDArray[np.int32]:
    """Elements start..stop of a binary int32 vector; only these are read from disk."""
    with _open(entry, key) as file:
        if file.read(2) != _BINARY:
            raise Unusable(f"{entry.path} holds no binary int vector for {key}")
        return _vector(file, key, entry.path, start, stop)


def read_vectors(path: Path) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """All int vectors of an archive: binary or text, .gz or not."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while True:
                key, ended = _key(file)
                if not key:
                    return
                first = b"\n" if ended else file.read(1)
                if first != _BINARY[:1]:
                    line = first if first == b"\n" else first + file.readline()
                    yield key, _numbers(line, key, path)
                elif file.read(1) == _BINARY[1:]:
                    yield key, _vector(file, key, path)
                else:
                    raise Unusable(f"{path} is damaged at {key}")
    except (EOFError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def read_table(path: Path) -> dict[str, str]:
    """Key -> rest of the line, of an scp, utt2spk, text, ... file; a key twice is an error."""
    table: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path.parent} lacks {path.name}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} cannot be read: it is no UTF-8 text") from None
    for number, line in enumerate(lines, 1):
        key, _, rest = line.strip().partition(" ") if "\t" not in line else _split(line)
        if not key:
            continue
        if key in table:
            raise UserError(f"{path} line {number} has {key} a second time")
        table[key] = rest.strip()
    return table


def locate(target: str, folder: Path) -> Entry:
    """The archive and offset behind an scp entry `PATH` or `PATH:OFFSET` of a file in `folder`."""
    if target.endswith("]"):
        raise Unusable(f"{target} is a range of rows: not read here, copy-feats writes it out")
    name, colon, digits = target.rpartition(":")
    path, offset = (Path(name), int(digits)) if colon and digits.isdigit() else (Path(target), None)
    # An archive, whose key is checked, first beside the scp file; else as Kaldi would open it,
    # relative to the scp file, beside it.
    choices = [path, folder / path, folder / path.name]
    if offset is not None:
        choices = [folder / path.name, path, folder / path]
    return Entry(next((choice for choice in choices if choice.is_file()), path), offset)


def _split(line: str) -> tuple[str, str, str]:
    key, *rest = line.split(None, 1) or [""]
    return key, " ", rest[0] if rest else ""


def _open(entry: Entry, key: str) -> BufferedIOBase:
    """The file, positioned at the object of this key."""
    try:
        file = entry.path.open("rb")
    except OSError as error:
        raise Unusable(f"{entry.path} cannot be read: {error.strerror}") from None
    if entry.offset is not None:
        name = f"{key} ".encode()
        file.seek(max(entry.offset - len(name), 0))
        if file.read(len(name)) != name:
            file.close()
            raise Unusable(f"{entry.path} does not hold {key} at byte {entry.offset}")
    return file


def _shape(file: BufferedIOBase) -> tuple[int, int] | None:
    """Rows and columns of a float32 matrix; None if it is of another kind."""
    head = file.read(5 + _HEAD.size)
    if head[:5] != _BINARY + _MATRIX or len(head) < 5 + _HEAD.size:
        return None
    _, rows, _, columns = _HEAD.unpack(head[5:])
    return rows, columns


def _vector(
    file: BufferedIOBase, key: str, path: Path, start: int = 0, stop: int | None = None
) -> NDArray[np.int32]:
    head = file.read(5)
    if len(head) < 5 or head[0] != 4:
        raise Unusable(f"{path} holds no int vector for {key}")
    (length,) = struct.unpack("<i", head[1:])
    first, last, _ = slice(start, stop).indices(length)
    wanted = max(last - first, 0)
    if first:
        file.seek(first * _ROW.itemsize, 1)
    body = np.frombuffer(file.read(wanted * _ROW.itemsize), dtype="u1")
    if len(body) < wanted * _ROW.itemsize:
        raise Unusable(f"{path} ends in the middle of {key}")
    rows = body.view(_ROW)
    if (rows["size"] != 4).any():
        raise Unusable(f"{path} is damaged at {key}")
    return rows["value"].astype(np.int32)


def _key(file: BufferedIOBase) -> tuple[str, bool]:
    """The next key, empty at the end of the file; and whether the line ended with it."""
    name = bytearray()
    while byte := file.read(1):
        if byte in b" \n":
            if name:
                return name.decode("utf-8", "replace"), byte == b"\n"
            continue
        name += byte
    return name.decode("utf-8", "replace"), True


def _numbers(line: bytes, key: str, path: Path) -> NDArray[np.int32]:
    words = line.split()
    if words[:1] == [b"["] and words[-1] == b"]":  # as kaldiio writes them
        words = words[1:-1]
    try:
        return np.array([int(word) for word in words], dtype=np.int32)
    except (ValueError, OverflowError):
        shown = line[:20].decode("utf-8", "replace").strip()
        raise UserError(f"{path} holds no int vector for {key}: {shown!r}...") from None


def _through_kaldiio(entry: Entry) -> NDArray[np.float32]:
    kaldiio = speech_extra("kaldiio")
    name = str(entry.path) if entry.offset is None else f"{entry.path}:{entry.offset}"
    try:
        matrix = kaldiio.load_mat(name)
    # kaldiio raises whatever its parser meets; any of it means the same to the user.
    except Exception as error:
        raise Unusable(f"{name} cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2:
        raise Unusable(f"{name} is no matrix")
    return matrix.astype(np.float32)
