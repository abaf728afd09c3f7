"""One matrix of a Kaldi archive: float, double or compressed.

Sizes in headers are checked against the size of the file before memory is allocated. Other objects
are refused and never interpreted: some formats, such as pickles, execute code.
"""

import os
import struct
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from normrnn.errors import UserError

BINARY = b"\0B"
_PLAIN = {b"FM": "<f4", b"DM": "<f8"}
_STEPS = {b"CM": 65535, b"CM2": 65535, b"CM3": 255}  # of the scale between smallest and largest
_CODES = {b"CM": "u1", b"CM2": "<u2", b"CM3": "u1"}
_SHAPE = struct.Struct("<bibi")  # size of an int, rows, size of an int, columns
_SCALE = struct.Struct("<ffii")  # smallest value, range, rows, columns
_NAMES = {
    b"[": "a matrix in text (copy-feats writes a binary one)",
    b"PKL": "a pickled object (PKL)",
    b"\x80": "a pickled object",
    b"NPY": "a NumPy array (NPY)",
    b"\x93NUMPY": "a NumPy array",
    b"AUDIO": "sound (AUDIO)",
    b"RIFF": "sound (RIFF)",
    b"fLaC": "sound (FLAC)",
    b"NIST": "sound (NIST)",
    b"\x1f\x8b": "gzipped data",
    b"PK\x03\x04": "a zip file",
    b"FV": "a vector (FV)",
    b"DV": "a vector (DV)",
    b"\x04": "an int vector",
}


class Unusable(UserError):  # noqa: N818  a property of an utterance
    """Why one utterance cannot be used; the others can."""


@dataclass(frozen=True)
class Matrix:
    """A matrix in an open file, whose values are not read yet."""

    file: BufferedIOBase
    where: str
    kind: bytes
    rows: int
    columns: int
    low: float = 0.0
    span: float = 0.0

    def read(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """Read rows start..stop; of plain matrices only these come from disk."""
        if self.kind not in _PLAIN:
            return self._decompressed()[start:stop]
        first, last, _ = slice(start, stop).indices(self.rows)
        kind = np.dtype(_PLAIN[self.kind])
        self.file.seek(first * self.columns * kind.itemsize, os.SEEK_CUR)
        values = self._numbers(kind, max(last - first, 0) * self.columns)
        with np.errstate(over="ignore"):  # a double too large for a float is an infinity
            return values.reshape(-1, self.columns).astype(np.float32)

    def _decompressed(self) -> NDArray[np.float32]:
        scale = np.float32(self.low), np.float32(self.span), np.float32(_STEPS[self.kind])
        low, span, steps = scale
        shape = self.rows, self.columns
        if self.kind != b"CM":
            codes = self._numbers(np.dtype(_CODES[self.kind]), self.rows * self.columns)
            return low + codes.reshape(shape).astype(np.float32) * span / steps
        # A column is three straight lines between its percentiles 0, 25, 75 and 100.
        corners = self._numbers(np.dtype("<u2"), 4 * self.columns).astype(np.float32)
        p0, p25, p75, p100 = (low + corners * span / steps).reshape(-1, 4, 1).swapaxes(0, 1)
        codes = self._numbers(np.dtype("u1"), self.rows * self.columns).astype(np.float32)
        codes = codes.reshape(self.columns, self.rows)
        below = p0 + (p25 - p0) * codes * np.float32(1 / 64)
        middle = p25 + (p75 - p25) * (codes - 64) * np.float32(1 / 128)
        above = p75 + (p100 - p75) * (codes - 192) * np.float32(1 / 63)
        return np.ascontiguousarray(
            np.where(codes <= 64, below, np.where(codes <= 192, middle, above)).T
        )

    def _numbers(self, kind: np.dtype, count: int) -> NDArray:
        body = self.file.read(count * kind.itemsize)
        if len(body) < count * kind.itemsize:
            raise Unusable(f"{self.where} is cut off")
        return np.frombuffer(body, dtype=kind)


def find_matrix(file: BufferedIOBase, key: str, path: Path) -> Matrix:
    """Return the matrix at the file's position, sizes checked; Unusable for other objects."""
    where = f"the matrix of {key} in {path}"
    start = file.tell()
    head = file.read(8)
    if head[:2] != BINARY:
        raise Unusable(f"{path} holds {_named(head)} for {key}; only matrices are read")
    kind, space, _ = head[2:].partition(b" ")
    if not space or kind not in {*_PLAIN, *_STEPS}:
        raise Unusable(f"{path} holds {_named(head[2:])} for {key}; only matrices are read")
    file.seek(start + 2 + len(kind) + 1)
    if kind in _PLAIN:
        four, rows, again, columns = _header(file, _SHAPE, where)
        if (four, again) != (4, 4):
            raise Unusable(f"{where} is damaged: its header is none")
        low = span = 0.0
    else:
        low, span, rows, columns = _header(file, _SCALE, where)
        if not (np.isfinite(low) and np.isfinite(span)):
            raise Unusable(f"{where} is damaged: its scale is not a number")
    if rows <= 0 or columns <= 0:
        raise Unusable(f"{where} has {rows} rows and {columns} columns: nothing to read")
    size = rows * columns * np.dtype({**_PLAIN, **_CODES}[kind]).itemsize
    size += 8 * columns if kind == b"CM" else 0
    there = os.fstat(file.fileno()).st_size - file.tell()
    if size > there:
        raise Unusable(
            f"{where} is cut off: {rows} rows and {columns} columns take {size:,} bytes,"
            f" {max(there, 0):,} are there"
        )
    return Matrix(file, where, kind, rows, columns, low, span)


def _header(file: BufferedIOBase, layout: struct.Struct, where: str) -> tuple:
    head = file.read(layout.size)
    if len(head) < layout.size:
        raise Unusable(f"{where} is cut off in its header")
    return layout.unpack(head)


def _named(head: bytes) -> str:
    """Name an object by its first bytes, which are not printed."""
    if not head:
        return "nothing"
    return next(
        (name for magic, name in _NAMES.items() if head.lstrip(b" ").startswith(magic)), "no matrix"
    )
