"""The note at the end of a checkpoint: which files belong to the run. Reading it needs no torch.

`torch.save` writes a zip archive; the note is its comment, in JSON with a checksum of its own, and
has the hash of the archive. model.safetensors has run, update and checksum in its own header.
"""

import hashlib
import io
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from normrnn.config.jsonio import differences, from_dict
from normrnn.errors import UserError
from normrnn.files import BLANK, is_sealed, open_regular, sealed
from normrnn.runs.names import CHECKPOINT

_START = b'{"sha256": "'
_LONGEST = 1 << 16
_SIZE = 2  # bytes of the comment's length, between archive and comment


@dataclass(frozen=True)
class Note:
    """State of the run's files when the checkpoint was written."""

    config: dict
    run: str
    """Random id."""
    updates: int
    best: int
    """Update of the best model."""
    model_sha256: str
    finished: int
    """Epochs of a finished run, else 0."""
    metrics_bytes: int
    metrics_sha256: str
    archive_sha256: str = ""
    """Hash of the checkpoint without its note."""

    def owns(self, model: Mapping[str, Any]) -> bool:
        """Whether a header of model.safetensors is of this run and update.

        A run that is killed or read between two writes may have a model newer than its checkpoint,
        that of the current validation. Of a finished run the checksum must match.
        """
        if self.finished:
            return model.get("sha256") == self.model_sha256
        updates = str(self.best), str(self.updates)
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


def note_of(content: bytes, path: Path) -> Note:
    """Return the note of a whole checkpoint; UserError if either is damaged."""
    note, size = _parse(content, path)
    if _hash(memoryview(content)[: -size - _SIZE]) != note.archive_sha256:
        raise UserError(f"{path} is damaged: wrong checksum")
    return note


def read_note(folder: Path) -> Note | None:
    """Return the note of the checkpoint; None if there is none, or if it is damaged."""
    path = folder / CHECKPOINT
    try:
        with open_regular(path) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _LONGEST, 0))
            return _parse(file.read(), path)[0]
    except (OSError, UserError):
        return None


def _parse(content: bytes, path: Path) -> tuple[Note, int]:
    """Return the note at the end of a file, and its size."""
    comment = content[max(content.rfind(_START), 0) :]
    try:
        if not is_sealed(comment, path):
            raise UserError(f"{path} is not a checkpoint of this program, or is damaged")
        values = json.loads(comment)
        del values["sha256"]
        return from_dict(Note, values), len(comment)
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: no note") from None


def _hash(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def changed_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Describe the fields in which two configs of a run differ and must not; empty if in none."""
    changed = differences(old, new)
    for name in ("epochs", "data"):  # may change before a run resumes
        changed.pop(name, None)
    return changed.get("recipe") or ", ".join(changed.values())


def config_changes(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Compare config.json with the checkpoint, as `changed_fields`; None without a checkpoint."""
    note = read_note(folder)
    return None if note is None else changed_fields(note.config, config)
