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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from normrnn import files
from normrnn.config.jsonio import differences, from_dict
from normrnn.errors import BusyError, UsageError, UserError

CONFIG = "config.json"
METRICS = "metrics.jsonl"
MODEL = "model.safetensors"  # the best on validation
CHECKPOINT = "checkpoint.pt"  # everything needed to resume
ENVIRONMENT = "environment.json"  # versions and machine
EVALUATION = "evaluation.json"  # from `normrnn evaluate`
DIVERGED = "diverged.txt"  # the error of a run whose loss was not finite; removed when it resumes
CSV = "metrics.csv"
LOCK = ".lock"
_LOCKED = {CONFIG, METRICS, MODEL, CHECKPOINT, ENVIRONMENT, DIVERGED, CSV}  # written under it
LOG = "log.txt"  # output of a run that `compare` or `search` started

_END, _END_SIZE = b"PK\x05\x06", 22  # of the archive: its last record, before the comment
_SIZE = 2  # bytes of the comment's length, at the end of that record
_LONGEST = 1 << 16


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a run directory and hold its lock; BusyError if another process trains there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "a file is in the way" if folder.exists() else error.strerror
        raise UsageError(f"{folder} cannot be created: {reason}") from None
    busy = BusyError(f"another process is training in {folder}")
    with files.exclusive(folder / LOCK, busy):
        files.remove_leftovers(folder, _LOCKED)
        yield


@dataclass
class Note:
    """State of a run when its checkpoint was written; the trainer keeps it while it trains."""

    config: dict[str, Any]
    run: str = field(default_factory=lambda: secrets.token_hex(16))  # a random id
    epoch: int = 0  # finished epochs; metrics.jsonl counts the current one from 1
    index: int = 0  # updates done in this epoch
    updates: int = 0
    seconds: float = 0.0  # spent in updates, without evaluation and checkpoints
    validation_due: bool = False  # whether the last update ended a segment not validated yet
    finished: int = 0  # epochs of a finished run, else 0
    best_loss: float = math.inf
    best_epoch: int = 0
    best_updates: int = 0  # update of the best model
    model_sha256: str = ""  # of the best model, as it was written last
    metrics_bytes: int = 0  # size of metrics.jsonl
    metrics_sha256: str = ""
    resume_bytes: int = 0  # its size before the test rows, which a run with more epochs removes
    archive_sha256: str = ""  # of the checkpoint without its note

    def __post_init__(self) -> None:
        size, limit = len(json.dumps(self.config)), _LONGEST - 1024  # for the other fields
        if size > limit:
            raise UserError(f"the settings have {size:,} bytes; at most {limit:,} can be recorded")

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
    comment = files.sealed(json.dumps({"sha256": files.BLANK, **values}))
    archive.write(len(comment).to_bytes(_SIZE, "little") + comment)


def write_note(folder: Path, note: Note) -> None:
    """Write a checkpoint that is only the note: of a call of a training function."""
    archive = io.BytesIO()
    zipfile.ZipFile(archive, "w").close()
    append_note(archive, note)
    files.write_whole(folder / CHECKPOINT, archive.getbuffer())


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
        with files.open_regular(path) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _LONGEST - _END_SIZE, 0))
            return _parse_note(file.read(), path)[0]
    except (OSError, UserError):
        return None


def _parse_note(content: bytes, path: Path) -> tuple[Note, int]:
    """Return the note at the end of a file, and its size."""
    comment = content[content.rfind(_END) + _END_SIZE :]
    try:
        values = json.loads(comment) if files.is_sealed(comment, path) else {}
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


Row = dict[str, Any]  # one line of metrics.jsonl
LARGEST = 1e300  # beyond it sums overflow; NaN is not below it either
_REQUIRED = {"split", "updates", "epoch", "loss", "count", "seconds"}
_OTHERS = {"split": str, "statistics": str, "saved": bool}  # fields that are not numbers


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
            with open(self.path, "ab", opener=files.following_no_link) as file:
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
        UserError if their checksum is wrong."""
        content = files.read_regular(self.path, files.ROWS) if self.path.exists() else b""
        if not note.covers(content):
            raise UserError(f"{self.path} is damaged: checksum mismatch with {CHECKPOINT}")
        self.size = note.resume_bytes
        self._digest = hashlib.sha256(content[: self.size])

    def truncate(self) -> None:
        """Drop rows newer than the checkpoint, and an incomplete last line."""
        if self.path.exists():
            with open(self.path, "r+b", opener=files.following_no_link) as file:
                file.truncate(self.size)


class Metrics(NamedTuple):
    """The rows of a run that is read."""

    rows: list[Row]  # up to the first invalid one
    problem: str  # of the first invalid one
    verified: bool  # whether the checkpoint has their hash


def read_metrics(folder: Path) -> Metrics:
    """Read the complete rows of a run, finished or training; none if there is no file yet."""
    note = read_note(folder)  # before the rows: a running training appends first
    try:
        content = files.read_regular(folder / METRICS, files.ROWS)
    except FileNotFoundError:
        content = b""
    except OSError as error:
        return Metrics([], f"{METRICS} cannot be read: {error.strerror}", verified=False)
    if note is not None and not note.covers(content):
        if read_note(folder) != note:  # a training has replaced both meanwhile
            return read_metrics(folder)
        return Metrics([], f"{METRICS}: checksum mismatch with {CHECKPOINT}", verified=False)
    return Metrics(*_parse(content), verified=note is not None)


def read_rows(folder: Path) -> list[Row]:
    """Return the complete rows of a run; UserError if they are damaged."""
    path = folder / METRICS
    state = path.stat() if path.exists() else None
    return list(_rows(folder, state and (state.st_mtime_ns, state.st_size)))


@lru_cache(maxsize=1000)
def _rows(folder: Path, changed: tuple[int, int] | None) -> list[Row]:  # noqa: ARG001
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
