"""checkpoint.pt and the one before it: everything needed to go on, with its checksum.

The file is torch's, a zip archive; the archive's comment holds a note in JSON: the checksum of the
file, the config, and how far metrics.jsonl was written, with the hash of that part. Whoever reads
the note needs no torch.
"""

import contextlib
import io
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from normrnn.errors import UserError, notice
from normrnn.files import largest_tensors, read_regular, write_whole
from normrnn.runs.names import CHECKPOINT, PREVIOUS
from normrnn.runs.note import START
from normrnn.runs.torchfile import TorchFileError, load_torch_file
from normrnn.seal import BLANK, is_sealed, seal

FORMAT = "normrnn checkpoint 2"
_COMMENT = 2  # bytes of a zip archive's end that say how long its comment is


class Checkpoints:
    """Reads and writes the two checkpoints of one directory."""

    def __init__(self, folder: Path) -> None:
        self.newest, self.previous = folder / CHECKPOINT, folder / PREVIOUS
        self._keep_previous = False

    def exist(self) -> bool:
        """Is there one to go on from?"""
        return self.newest.exists() or self.previous.exists()

    def write(self, payload: Mapping[str, Any], note: Mapping[str, Any]) -> None:
        """The newest becomes the previous one; there is a whole one at any moment."""
        # In memory first: torch's own writer reports a full disk as an internal error.
        buffer = io.BytesIO()
        torch.save({"format": FORMAT, **payload}, buffer)
        comment = json.dumps({"sha256": BLANK, **note}).encode()
        start = buffer.seek(-_COMMENT, os.SEEK_END) + _COMMENT
        buffer.write(len(comment).to_bytes(_COMMENT, "little") + comment)
        seal(buffer.getbuffer(), start)
        if not self._keep_previous and self.newest.exists():
            self._rotate()
        write_whole(self.newest, buffer.getbuffer())
        self._keep_previous = False

    def read(self) -> dict[str, Any] | None:
        """What was written last, None if nothing.

        A damaged newest one is passed over for the one before it, which is said.
        """
        if not self.newest.exists():  # stopped between two names, where files have one only
            if not self.previous.exists():
                return None
            notice(f"{self.newest} is missing; going on from {self.previous.name}")
            return _read(self.previous)
        try:
            return _read(self.newest)
        except UserError as damage:
            if not self.previous.exists():
                raise
            try:
                payload = _read(self.previous)
            except UserError:
                raise damage from None
            notice(f"{damage}; going on from {self.previous.name}")
            self._keep_previous = True  # until there is a good newest one again
            return payload

    def _rotate(self) -> None:
        temporary = self.previous.with_name(f".{PREVIOUS}.{secrets.token_hex(8)}.tmp")
        try:
            os.link(self.newest, temporary, follow_symlinks=False)
            temporary.replace(self.previous)
            # Two names of one file, as a kill leaves them, are both kept by a replacement.
            temporary.unlink(missing_ok=True)
        except OSError:  # a file system without second names
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
                self.newest.replace(self.previous)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_regular(path, largest_tensors())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    sealed = is_sealed(content, path, max(content.rfind(START), 0))
    try:
        payload = load_torch_file(io.BytesIO(content))
    except TorchFileError as error:
        raise UserError(f"{path} cannot be read: not a checkpoint ({error})") from None
    if not isinstance(payload, dict) or payload.get("format") != FORMAT:
        raise UserError(f"{path} is not a checkpoint of this program")
    if not sealed:
        raise UserError(f"{path} is damaged: its checksum is missing")
    return payload
