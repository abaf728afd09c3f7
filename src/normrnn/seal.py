"""Checksums inside files: the one envelope of everything that is written.

A field `"sha256": "…"` holds the hash of the whole file with zeros in its place. So content and
checksum are written at once, and damage anywhere, the field included, is recognised.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normrnn.errors import UserError
from normrnn.files import read_regular

BLANK = "0" * 64
_FIELD = re.compile(rb'"sha256": ?"([0-9a-f]{64})"')


def seal(content: bytearray, start: int = 0) -> str:
    """Write the hash into the first field after `start`, and return it."""
    field = _FIELD.search(content, start)
    assert field is not None
    digest = _hash(content, *field.span(1))
    content[field.start(1) : field.end(1)] = digest
    return digest.decode()


def is_sealed(content: bytes, path: Path, start: int = 0, stop: int | None = None) -> bool:
    """Whether there is a hash between `start` and `stop`; UserError if it is wrong."""
    field = _FIELD.search(content, start, len(content) if stop is None else stop)
    if field is None:
        return False
    if field[1] != _hash(content, *field.span(1)):
        raise UserError(f"{path} is damaged: wrong checksum")
    return True


def sealed(text: str) -> bytes:
    """Return a text with its hash filled in."""
    content = bytearray(text.encode())
    seal(content)
    return bytes(content)


def sealed_json(values: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> bytes:
    """Return a JSON object, or a list of at least one, with a hash as the first field."""
    if isinstance(values, Mapping):
        content: Any = {"sha256": BLANK, **values}
    else:
        content = [{"sha256": BLANK, **values[0]}, *values[1:]]
    return sealed(json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path, kind: type = dict) -> tuple[Any, bool]:
    """Return a JSON object, or with `list` a list of them, without hash, and whether it had one.

    FileNotFoundError if the file does not exist; UserError if it is damaged or cannot be read.
    """
    try:
        content = read_regular(path)
        has_hash = is_sealed(content, path)
        values = json.loads(content)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: not JSON") from None
    objects = values if kind is list else [values]
    if not isinstance(values, kind) or not all(isinstance(one, dict) for one in objects):
        raise UserError(f"{path} is damaged: not a JSON {kind.__name__}")
    for one in objects[:1]:
        one.pop("sha256", None)
    return values, has_hash


def _hash(content: bytes | bytearray, start: int, stop: int) -> bytes:
    view = memoryview(content)
    digest = hashlib.sha256(view[:start])
    digest.update(BLANK.encode())
    digest.update(view[stop:])
    return digest.hexdigest().encode()
