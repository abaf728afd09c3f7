"""Append to metrics.jsonl, and cut it back when a run resumes."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from normrnn.errors import UserError
from normrnn.files import following_no_link, open_regular


class MetricsFile:
    """One JSON object a line, only ever appended to, and cut back when a run resumes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        """Of what this process wrote or found: known after `cut`."""

    def size(self) -> int:
        """Bytes so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    def sha256(self) -> str:
        """Hash of all rows, for whoever cut the file and wrote to it since."""
        return self._digest.hexdigest()

    def append(self, row: dict[str, Any]) -> None:
        """Write one row through to the disk: no checkpoint may know more than the file."""
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
        """UserError unless the file begins with these rows; without a hash only their size counts.

        What is behind them a resume writes again.
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
        """Drop what the checkpoint does not know, a torn last line included."""
        self.check(size)
        if self.path.exists():
            with open(self.path, "r+b", opener=following_no_link) as file:
                file.truncate(size)

    def _begin(self, size: int) -> bytes:
        if not size:
            return b""
        with open_regular(self.path) as file:
            return file.read(size)
