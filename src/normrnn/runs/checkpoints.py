"""checkpoint.pt and the previous one: everything needed to resume, with a checksum.

The file is written by `torch.save`, a zip archive. The archive's comment holds a note in JSON: the
checksum of the file, the config, and size and hash of metrics.jsonl. Reading it needs no torch.
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
_COMMENT = 2  # bytes of the comment's length, at the end of a zip archive


class Checkpoints:
    """The two checkpoints of one directory."""

    def __init__(self, folder: Path) -> None:
        self.newest, self.previous = folder / CHECKPOINT, folder / PREVIOUS
        self._keep_previous = False

    def write(self, payload: Mapping[str, Any], note: Mapping[str, Any]) -> None:
        """Write a checkpoint; the newest becomes the previous one."""
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
        """Return the newest checkpoint, None if there is none.

        If it is damaged, give notice and return the previous one.
        """
        if not self.newest.exists():  # killed between two renames
            if not self.previous.exists():
                return None
            notice(f"{self.newest} is missing; resuming from {self.previous.name}")
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
            notice(f"{damage}; resuming from {self.previous.name}")
            self._keep_previous = True  # until a good newest one is written
            return payload

    def _rotate(self) -> None:
        temporary = self.previous.with_name(f".{PREVIOUS}.{secrets.token_hex(8)}.tmp")
        try:
            os.link(self.newest, temporary, follow_symlinks=False)
            temporary.replace(self.previous)
            # A rename between two names of one file, left by a kill, removes neither.
            temporary.unlink(missing_ok=True)
        except OSError:  # a file system without hard links
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
