"""metrics.jsonl: a JSON object per line, appended to, cut back by a resume, and read."""

import hashlib
import json
import math
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from normrnn.errors import UserError
from normrnn.files import ROWS, following_no_link, open_regular, read_regular
from normrnn.runs.names import METRICS
from normrnn.runs.note import read_note

Row = dict[str, Any]
"""One line of metrics.jsonl."""
_LARGEST = 1e300  # beyond it, sums overflow; NaN is not below it either
_REQUIRED = {"split", "updates", "epoch", "loss", "count", "seconds"}
_OTHERS = {"split": str, "statistics": str, "saved": bool}
"""Fields that are not numbers."""


class MetricsFile:
    """The file of the process that writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = hashlib.sha256()

    def size(self) -> int:
        """Bytes so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    def sha256(self) -> str:
        """Hash of all rows, after `cut`."""
        return self._digest.hexdigest()

    def append(self, row: Row) -> None:
        """Append a row and flush it to the disk, so that no checkpoint knows more than the file."""
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        try:
            with open(self.path, "ab", opener=following_no_link) as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror or error}") from None
        self._digest.update(line)

    def check(self, size: int, sha256: str) -> None:
        """Raise UserError unless the file begins with these rows."""
        if self.size() < size or self._hash(size).hexdigest() != sha256:
            raise UserError(f"{self.path} is damaged: its rows are not what was written")

    def cut(self, size: int) -> None:
        """Drop rows newer than the checkpoint, and an incomplete last line."""
        self._digest = self._hash(size)
        if self.path.exists():
            with open(self.path, "r+b", opener=following_no_link) as file:
                file.truncate(size)

    def _hash(self, size: int) -> Any:
        if not size:
            return hashlib.sha256()
        with open_regular(self.path) as file:
            return hashlib.sha256(file.read(size))


class Metrics(NamedTuple):
    """The rows of a run that is read."""

    rows: list[Row]
    """Up to the first invalid one."""
    problem: str
    """Of the first invalid one."""
    verified: bool
    """Whether the checkpoint has their hash."""


def read_metrics(folder: Path) -> Metrics:
    """Read the complete rows of a run, finished or training; none if there is no file yet."""
    note = read_note(folder)  # before the rows: a running training appends first
    try:
        content = read_regular(folder / METRICS, ROWS)
    except FileNotFoundError:
        content = b""
    except OSError as error:
        return Metrics([], f"{METRICS} cannot be read: {error.strerror}", verified=False)
    if note is not None and not note.covers(content):
        if read_note(folder) != note:  # a training has replaced both meanwhile
            return read_metrics(folder)
        return Metrics([], f"{METRICS} is not what was written", verified=False)
    return Metrics(*_parse(content), verified=note is not None)


def read_rows(folder: Path) -> list[Row]:
    """Return the complete rows of a run; UserError if they are damaged."""
    path = folder / METRICS
    return list(_rows(folder, path.stat().st_mtime_ns if path.exists() else 0))


@lru_cache(maxsize=100)
def _rows(folder: Path, changed: int) -> list[Row]:  # noqa: ARG001
    """Read again only what changed: several runs are watched while they train."""
    rows, problem, _ = read_metrics(folder)
    if problem:
        raise UserError(f"{folder / METRICS} is damaged: {problem}")
    return rows


def _parse(content: bytes) -> tuple[list[Row], str]:
    *complete, _torn = content.decode("utf-8", "replace").split("\n")
    rows: list[Row] = []
    for number, line in enumerate(complete, 1):
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not _is_row(row) or (rows and row["updates"] < rows[-1]["updates"]):
            return rows, f"line {number} of {METRICS} is not a row of metrics"
        rows.append(row)
    return rows, ""


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not row.keys() >= _REQUIRED:
        return False
    for key, value in row.items():
        if key in _OTHERS:
            if type(value) is not _OTHERS[key]:
                return False
        elif type(value) not in (int, float) or not abs(value) < _LARGEST:
            return False
    return row["count"] > 0 and row["updates"] >= 0 and row["epoch"] > 0


def finite_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with a finite loss; JSON has no other numbers."""
    return [row for row in rows if math.isfinite(row["loss"])]


def epoch_averages(rows: Iterable[Row]) -> list[Row]:
    """Return epoch and loss, the running average in training over targets, of every epoch."""
    sums: dict[int, tuple[float, int]] = {}
    for row in rows:
        if row["split"] == "train":
            total, count = sums.get(row["epoch"], (0.0, 0))
            sums[row["epoch"]] = total + row["loss"] * row["count"], count + row["count"]
    return [{"epoch": epoch, "loss": total / count} for epoch, (total, count) in sums.items()]
