"""The note at the end of a checkpoint: which files belong to the run. Reading it needs no torch.

model.safetensors has the run's id, its update and its checksum in its own header.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from normrnn.config.base import settled
from normrnn.config.jsonio import differences, flat, from_dict
from normrnn.errors import UserError
from normrnn.files import largest_tensors, open_regular, read_regular
from normrnn.runs.names import CHECKPOINT, CONFIG
from normrnn.seal import is_sealed, without_hash

START = b'{"sha256": "'
DATA_CHANGED = "the data has changed"
_LONGEST = 1 << 16


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
        return hashlib.sha256(memoryview(metrics)[:size]).hexdigest() == self.metrics_sha256


def read_note(folder: Path) -> Note | None:
    """Return the note of the newest checkpoint, None if it has none.

    The note is not verified: `is_intact` verifies the whole file.
    """
    try:
        with open_regular(folder / CHECKPOINT) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _LONGEST, 0))
            tail = file.read()
        return from_dict(Note, without_hash(json.loads(tail[tail.rindex(START) :])))
    except (OSError, ValueError, RecursionError, UserError):
        return None


def is_intact(folder: Path) -> bool:
    """Whether the checksum of the newest checkpoint, its note included, is right."""
    try:
        content = read_regular(folder / CHECKPOINT, largest_tensors())
        return is_sealed(content, folder / CHECKPOINT, max(content.rfind(START), 0))
    except (OSError, UserError):
        return False


class Changes(NamedTuple):
    """Descriptions of the fields that changed, in words; empty if none did."""

    refused: str
    allowed: str
    """Of fields that may change before a run resumes: epochs, and the place of the data."""


def changed_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Compare two configs of a run. Fields that the old one does not have are not compared."""
    before, after = settled(flat(old)), settled(flat(new))
    changed = differences(before, {k: v for k, v in after.items() if k in before})
    allowed = ", ".join(changed.pop(name) for name in ("epochs", "data") if name in changed)
    if "recipe" in changed:
        return Changes(changed["recipe"], allowed)
    if changed.pop("data_sha256", None):  # the hash itself is not shown
        changed = {"data": DATA_CHANGED, **changed}
    return Changes(", ".join(changed.values()), allowed)


def config_changes(folder: Path, config: Mapping[str, Any]) -> Changes | None:
    """Compare config.json with the newest checkpoint; None if that is unknown."""
    note = read_note(folder)
    if note is None:
        return None
    changes = changed_fields(note.config, config)
    if any(changes) and not is_intact(folder):
        return None
    since = f"{CONFIG} was changed since {CHECKPOINT} was written: "
    return Changes(*(since + text if text else "" for text in changes))
