"""Files of a run directory that are read without torch: metrics.jsonl and the checkpoint's note.

metrics.jsonl has a JSON object per line, is appended to, cut back by a resume, and read. The note
at the end of a checkpoint says which files belong to the run: `torch.save` writes a zip archive;
the note is its comment, in JSON with a checksum of its own, and has the hash of the archive.
model.safetensors has run, update and checksum in its own header.
"""

import hashlib
import io
import json
import math
import os
import secrets
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from normrnn.config.jsonio import differences, from_dict
from normrnn.errors import UserError
from normrnn.files import (
    BLANK,
    ROWS,
    following_no_link,
    is_sealed,
    open_regular,
    read_regular,
    sealed,
    write_whole,
)

CONFIG = "config.json"
METRICS = "metrics.jsonl"
MODEL = "model.safetensors"
"""The best on validation."""
CHECKPOINT = "checkpoint.pt"
"""Everything needed to resume."""
ENVIRONMENT = "environment.json"
"""Versions and machine."""
EVALUATION = "evaluation.json"
"""From `normrnn evaluate`."""
DIVERGED = "diverged.txt"
"""The error of a run whose loss was not finite; removed when it resumes."""
LOCK = ".lock"
LOG = "log.txt"
"""Output of a run that `compare` or `search` started."""

_START = b'{"sha256": "'
_LONGEST = 1 << 16
_SIZE = 2  # bytes of the comment's length, between archive and comment


@dataclass
class Note:
    """State of a run when its checkpoint was written; the trainer keeps it while it trains."""

    config: dict[str, Any]
    run: str = field(default_factory=lambda: secrets.token_hex(16))
    """Random id."""
    epoch: int = 0
    """Finished epochs; metrics.jsonl counts the current one from 1."""
    index: int = 0
    """Updates done in this epoch."""
    updates: int = 0
    seconds: float = 0.0
    """Time spent in updates, without evaluation and checkpoints."""
    validation_due: bool = False
    """Whether the last update ended a segment that is not validated yet."""
    finished: int = 0
    """Epochs of a finished run, else 0."""
    best_loss: float = math.inf
    best_epoch: int = 0
    best_updates: int = 0
    """Update of the best model."""
    model_sha256: str = ""
    """Checksum of the best model, as it was written last."""
    metrics_bytes: int = 0
    """Size of metrics.jsonl."""
    metrics_sha256: str = ""
    resume_bytes: int = 0
    """Its size before the test rows, which a run with more epochs removes."""
    archive_sha256: str = ""
    """Hash of the checkpoint without its note."""

    def owns(self, model: Mapping[str, Any]) -> bool:
        """Whether a header of model.safetensors is of this run and update.

        A run that is killed or read between two writes may have a model newer than its checkpoint,
        that of the current validation. Of a finished run the checksum must match.
        """
        if self.finished:
            return model.get("sha256") == self.model_sha256
        updates = str(self.best_updates), str(self.updates)
        return model.get("run") == self.run and model.get("updates") in updates

    def covers(self, metrics: bytes) -> bool:
        """Whether metrics.jsonl begins with the rows that it had. Later rows are newer than the
        checkpoint, and are written again when the run resumes; a finished run has none."""
        size = self.metrics_bytes
        if not 0 <= size <= len(metrics) or (self.finished and size < len(metrics)):
            return False
        return _hash(memoryview(metrics)[:size]) == self.metrics_sha256


def append_note(archive: io.BytesIO, note: Note) -> None:
    """Append the note to what `torch.save` wrote."""
    archive.seek(-_SIZE, os.SEEK_END)
    archive.truncate()
    values = asdict(replace(note, archive_sha256=_hash(archive.getbuffer())))
    comment = sealed(json.dumps({"sha256": BLANK, **values}))
    archive.write(len(comment).to_bytes(_SIZE, "little") + comment)


def write_note(folder: Path, note: Note) -> None:
    """Write a checkpoint that is only the note: of a call of a training function."""
    archive = io.BytesIO()
    zipfile.ZipFile(archive, "w").close()
    append_note(archive, note)
    write_whole(folder / CHECKPOINT, archive.getbuffer())


def note_of(content: bytes, path: Path) -> Note:
    """Return the note of a whole checkpoint; UserError if either is damaged."""
    note, size = _parse_note(content, path)
    if _hash(memoryview(content)[: -size - _SIZE]) != note.archive_sha256:
        raise UserError(f"{path} is damaged: wrong checksum")
    return note


def read_note(folder: Path) -> Note | None:
    """Return the note of the checkpoint; None if there is none, or if it is damaged."""
    path = folder / CHECKPOINT
    try:
        with open_regular(path) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _LONGEST, 0))
            return _parse_note(file.read(), path)[0]
    except (OSError, UserError):
        return None


def _parse_note(content: bytes, path: Path) -> tuple[Note, int]:
    """Return the note at the end of a file, and its size."""
    comment = content[max(content.rfind(_START), 0) :]
    try:
        values = json.loads(comment) if is_sealed(comment, path) else {}
        del values["sha256"]
        return from_dict(Note, values), len(comment)
    except (ValueError, KeyError, RecursionError):
        raise UserError(f"{path} is damaged, or not a checkpoint of this program") from None


def _hash(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def changed_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Describe the fields in which two configs of a run differ and must not; empty if in none."""
    changed = differences(old, new)
    for name in ("epochs", "data"):  # may change before a run resumes
        changed.pop(name, None)
    return changed.get("recipe") or ", ".join(changed.values())


Row = dict[str, Any]
"""One line of metrics.jsonl."""
LARGEST = 1e300
"""Beyond it sums overflow; NaN is not below it either."""
_REQUIRED = {"split", "updates", "epoch", "loss", "count", "seconds"}
_OTHERS = {"split": str, "statistics": str, "saved": bool}
"""Fields that are not numbers."""


class MetricsFile:
    """The file of the process that writes it."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self._digest = path, 0, hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Hash of all rows."""
        return self._digest.hexdigest()

    def append(self, row: Row, flush: bool = True) -> None:
        """Append a row and flush it to the disk, so that no checkpoint knows more than the file."""
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        try:
            with open(self.path, "ab", opener=following_no_link) as file:
                file.write(line)
                if flush:
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror or error}") from None
        self.size += len(line)
        self._digest.update(line)

    def resume(self, note: Note) -> None:
        """Continue after the rows of the checkpoint without test rows; `truncate` drops the others.
        UserError if they are not what was written."""
        content = read_regular(self.path, ROWS) if self.path.exists() else b""
        if not note.covers(content):
            raise UserError(f"{self.path} is damaged: its rows are not what was written")
        self.size = note.resume_bytes
        self._digest = hashlib.sha256(content[: self.size])

    def truncate(self) -> None:
        """Drop rows newer than the checkpoint, and an incomplete last line."""
        if self.path.exists():
            with open(self.path, "r+b", opener=following_no_link) as file:
                file.truncate(self.size)


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


@lru_cache(maxsize=1000)
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
        elif type(value) not in (int, float) or not abs(value) < LARGEST:
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
