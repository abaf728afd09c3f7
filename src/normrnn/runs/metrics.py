"""Append to metrics.jsonl, and cut it back when a run resumes."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from normrnn.errors import UserError
from normrnn.files import following_no_link, open_regular


class MetricsFile:
    """A JSON object per line, appended to, and truncated when a run resumes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        """Of all rows; known after `check` or `cut`."""

    def size(self) -> int:
        """Bytes so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    def sha256(self) -> str:
        """Hash of all rows, after `check` or `cut`."""
        return self._digest.hexdigest()

    def append(self, row: dict[str, Any]) -> None:
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

    def check(self, size: int, sha256: str | None = None) -> None:
        """Raise UserError unless the file begins with these rows; without a hash, so many bytes.

        Later rows are written again when the run resumes.
        """
        if self.size() < size:
            raise UserError(
                f"{self.path} is shorter ({self.size()} bytes) than when the checkpoint was written"
                f" ({size}): rows are missing"
            )
        found = hashlib.sha256(self._begin(size))
        if sha256 not in (None, found.hexdigest()):
            raise UserError(f"{self.path} is damaged: its rows are not what was written")
        self._digest = found

    def cut(self, size: int) -> None:
        """Drop rows newer than the checkpoint, and an incomplete last line."""
        self.check(size)
        if self.path.exists():
            with open(self.path, "r+b", opener=following_no_link) as file:
                file.truncate(size)

    def _begin(self, size: int) -> bytes:
        if not size:
            return b""
        with open_regular(self.path) as file:
            return file.read(size)
