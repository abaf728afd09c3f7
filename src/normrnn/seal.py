"""Checksums inside files: the one envelope of everything that is written.

A field `"sha256": "…"` holds the hash of the whole file with zeros in its place. So content and
checksum are written at once, and damage anywhere, the field included, is recognised.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, TypeVar

from normrnn.errors import UserError
from normrnn.files import read_regular

T = TypeVar("T", dict[str, Any], list[Any])
BLANK = "0" * 64
_FIELD = re.compile(rb'"sha256": ?"([0-9a-f]{64})"')


def seal(content: bytearray | memoryview, start: int = 0, rest: bytes | memoryview = b"") -> str:
    """Write the hash into the first field after `start`, and return it.

    `rest` is what follows `content` in the file: it is hashed too.
    """
    field = _FIELD.search(content, start)
    assert field is not None
    digest = _hash(content, *field.span(1), rest)
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


def sealed_json(values: dict[str, Any]) -> bytes:
    """Return a JSON object with its hash as first field."""
    return sealed(json.dumps(with_place(values), indent=2, allow_nan=False) + "\n")


def read_json(path: Path, kind: type[T]) -> tuple[T, bool]:
    """Return the content of a JSON file of this type, and whether it has a hash.

    FileNotFoundError if the file does not exist; UserError if it is damaged or cannot be read.
    """
    try:
        content = read_regular(path)
        sealed = is_sealed(content, path)
        values = json.loads(content)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: not JSON") from None
    if not isinstance(values, kind):
        raise UserError(f"{path} is damaged: not a JSON {'object' if kind is dict else 'list'}")
    return values, sealed


def with_place(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with an empty hash as first field."""
    return {"sha256": BLANK, **values}


def sealed(text: str) -> bytes:
    """Return a text with its hash filled in."""
    content = bytearray(text.encode())
    seal(content)
    return bytes(content)


def without_hash(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without the hash."""
    return {name: value for name, value in values.items() if name != "sha256"}


def _hash(
    content: bytes | bytearray | memoryview, start: int, stop: int, rest: bytes | memoryview = b""
) -> bytes:
    view = memoryview(content)
    digest = hashlib.sha256(view[:start])
    digest.update(BLANK.encode())
    digest.update(view[stop:])
    digest.update(rest)
    return digest.hexdigest().encode()
