"""The note at the end of a checkpoint, read without torch: which files belong to the run.

It has the run's random id, the update of the checkpoint and of the best model, the checksum of that
model, and size and hash of metrics.jsonl. model.safetensors has the id, its update and its checksum
in its own header.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from normrnn.config.jsonio import differences, flat
from normrnn.errors import UserError
from normrnn.files import largest_tensors, open_regular, read_regular
from normrnn.runs.names import CHECKPOINT, CONFIG, METRICS
from normrnn.seal import is_sealed

START = b'{"sha256": "'
_STATE = {"run", "updates", "best", "finished", "model_sha256"}
_LONGEST = 1 << 16
_TRIES = 5


def read_note(folder: Path) -> dict[str, Any] | None:
    """Return the note of the newest checkpoint, None if it has none.

    The note is not verified: `trusted` verifies the whole file.
    """
    try:
        with open_regular(folder / CHECKPOINT) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _LONGEST, 0))
            tail = file.read()
        note = json.loads(tail[tail.rindex(START) :])
    except (OSError, ValueError, RecursionError):
        return None
    return note if isinstance(note, dict) else None


def trusted(folder: Path) -> bool:
    """Whether the checksum of the newest checkpoint, its note included, is right."""
    try:
        content = read_regular(folder / CHECKPOINT, largest_tensors())
        return is_sealed(content, folder / CHECKPOINT, max(content.rfind(START), 0))
    except (OSError, UserError):
        return False


def belongs(model: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether a header of model.safetensors has the run and the update of a checkpoint.

    A run that is killed or read between two writes may have a model newer than its checkpoint, that
    of the current validation. Of a finished run the checksum must match.
    """
    if state["finished"]:
        return model.get("sha256") == state["model_sha256"]
    updates = {str(state[name]) for name in ("best", "updates")}
    return model.get("run") == state["run"] and model.get("updates") in updates


def model_belongs(folder: Path, model: Mapping[str, Any]) -> bool:
    """`belongs` by the newest checkpoint in a folder; True if that has no note or is damaged."""
    note = read_note(folder)
    if note is None or not note.keys() >= _STATE:
        return True
    return belongs(model, note) or not trusted(folder)


class Changes(NamedTuple):
    """Descriptions of the fields that changed since a checkpoint; empty if none did."""

    edited: str
    own: str
    """Fields that may change before resuming: epochs, and the place of the data."""


def config_changes(folder: Path, config: Mapping[str, Any]) -> Changes | None:
    """Compare with the config in the newest checkpoint; None if that is unknown."""
    written = (read_note(folder) or {}).get("config")
    if not isinstance(written, Mapping):
        return None
    known = flat(written)  # fields that were added later are not edits
    changed = {k: text for k, text in differences(written, config).items() if k in known}
    if changed and not trusted(folder):
        return None
    own = [changed.pop(name) for name in ("epochs", "data") if name in changed]
    since = f"{CONFIG} was changed since {CHECKPOINT} was written: "
    return Changes(*(since + ", ".join(some) if some else "" for some in (changed.values(), own)))


def metrics_as_written(folder: Path) -> bool | None:
    """Whether metrics.jsonl begins with the rows of the newest checkpoint; None if unknown.

    Later rows are newer than the checkpoint, and are written again when the run resumes; a
    finished run has none.
    """
    note = read_note(folder)
    for _ in range(_TRIES):
        size, written = ((note or {}).get(f"metrics_{what}") for what in ("bytes", "sha256"))
        if not isinstance(size, int) or not isinstance(written, str):
            return None
        try:
            with open_regular(folder / METRICS) as file:
                there = os.fstat(file.fileno()).st_size
                longer = there > size and (note or {}).get("finished")
                content = file.read(size) if 0 <= size <= there and not longer else b""
        except OSError:
            content = b""
        if len(content) == size and hashlib.sha256(content).hexdigest() == written:
            return True
        before, note = note, read_note(folder)
        if note == before:
            return False if trusted(folder) else None
    return None  # the run is training and writes faster than we read
