"""The note at the end of a checkpoint, for readers without torch.

It says which files are the run's: the run's random id, the update of the checkpoint and of the best
model, the checksum of that model, and the size and the hash of metrics.jsonl at that time.
model.safetensors carries the run's id, its update and its checksum in its own header.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from normrnn.config.jsonio import flat
from normrnn.errors import UserError
from normrnn.files import largest_tensors, open_regular, read_regular
from normrnn.runs.names import CHECKPOINT, CONFIG, METRICS
from normrnn.seal import is_sealed

START = b'{"sha256": "'
_STATE = {"run", "updates", "best", "finished", "model_sha256"}
_LONGEST = 1 << 16
_TRIES = 5


def read_note(folder: Path) -> dict[str, Any] | None:
    """What the newest checkpoint says about the files beside it; None if it says nothing.

    The note is taken at its word: `trusted` asks the whole file.
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
    """Is the newest checkpoint what was written, its note included?"""
    try:
        content = read_regular(folder / CHECKPOINT, largest_tensors())
        return is_sealed(content, folder / CHECKPOINT, max(content.rfind(START), 0))
    except (OSError, UserError):
        return False


def belongs(model: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether the header of model.safetensors is of the run and the update that a checkpoint says.

    A run that is killed, or read, between two files may have a model that is newer than its
    checkpoint: that of the validation under way. The model of a finished run is known exactly.
    """
    if state["finished"]:
        return model.get("sha256") == state["model_sha256"]
    updates = {str(state[name]) for name in ("best", "updates")}
    return model.get("run") == state["run"] and model.get("updates") in updates


def model_belongs(folder: Path, model: Mapping[str, Any]) -> bool:
    """The same by the newest checkpoint in a folder; True if that does not say or is damaged."""
    note = read_note(folder)
    if note is None or not note.keys() >= _STATE:
        return True
    return belongs(model, note) or not trusted(folder)


class Changes(NamedTuple):
    """In what a config differs from that of its checkpoint, in words; empty: in nothing."""

    edited: str
    own: str
    """What a run that goes on for longer, or with moved data, has before its checkpoint."""


def config_changes(folder: Path, config: Mapping[str, Any]) -> Changes | None:
    """Since the newest checkpoint; None if that does not say. Fields that only `config` has are
    younger than the checkpoint."""
    written = (read_note(folder) or {}).get("config")
    if not isinstance(written, Mapping):
        return None
    now = flat(config)
    changed = {
        name: f"{name} was {value}, is now {now.get(name)}"
        for name, value in flat(written).items()
        if name not in now or repr(now[name]) != repr(value)
    }
    if changed and not trusted(folder):
        return None
    own = [changed.pop(name) for name in ("epochs", "data") if name in changed]
    since = f"{CONFIG} was changed since {CHECKPOINT} was written: "
    return Changes(*(since + ", ".join(some) if some else "" for some in (changed.values(), own)))


def metrics_as_written(folder: Path) -> bool | None:
    """Whether metrics.jsonl begins as the newest checkpoint knows it; None if that is not known.

    Rows behind that part are newer than the checkpoint, and a run that resumes writes them again;
    a finished run has none.
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
    return None  # it trains faster than we read
