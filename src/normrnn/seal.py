"""A checksum inside the file that it is of.

A field `"sha256": "…"` holds the hash of the whole file as it is with zeros in that place. So one
write carries both, and a file that is damaged anywhere, the field included, is known for it.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from normrnn.errors import UserError, notice

BLANK = "0" * 64
_FIELD = re.compile(rb'"sha256": ?"([0-9a-f]{64})"')


def seal(content: bytearray | memoryview, start: int = 0) -> None:
    """Put the hash into the first field that is found behind `start`; it must be there, blank."""
    field = _FIELD.search(content, start)
    assert field is not None
    content[field.start(1) : field.end(1)] = _hash(content, *field.span(1))


def is_sealed(content: bytes, path: Path, start: int = 0, stop: int | None = None) -> bool:
    """Whether there is a hash between `start` and `stop`; UserError if it is of something else."""
    field = _FIELD.search(content, start, len(content) if stop is None else stop)
    if field is None:
        return False
    if field[1] != _hash(content, *field.span(1)):
        raise UserError(f"{path} is damaged: it is not what was written")
    return True


def not_verified(path: Path) -> None:
    """Say that a file carries no checksum."""
    notice(f"{path} has no checksum, as older versions wrote it: not verified")


def sealed_json(values: dict[str, Any]) -> bytes:
    """A JSON object with its hash as first field."""
    text = json.dumps({"sha256": BLANK, **values}, indent=2, allow_nan=False)
    content = bytearray(f"{text}\n".encode())
    seal(content)
    return bytes(content)


def _hash(content: bytes | bytearray | memoryview, start: int, stop: int) -> bytes:
    view = memoryview(content)
    digest = hashlib.sha256(view[:start])
    digest.update(BLANK.encode())
    digest.update(view[stop:])
    return digest.hexdigest().encode()
