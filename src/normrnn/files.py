"""Paths as people write them, and files that are there whole or not at all."""

import contextlib
import os
from pathlib import Path

from normrnn.errors import UserError


def expanded(path: str | Path) -> Path:
    """The path with its ~ resolved; UserError if that user has no home here."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path} does not exist: no home directory of that name") from None


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Replace a file through to the disk; UserError, and the old one kept, if that fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(
            f"{path} cannot be written: {error.strerror or error}; what was there is kept"
        ) from None
