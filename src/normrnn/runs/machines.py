"""environment.json: versions and machines of a run, a list with a checksum in its first entry."""

import json
from pathlib import Path
from typing import Any

from normrnn.errors import UserError
from normrnn.files import write_whole
from normrnn.runs.names import ENVIRONMENT
from normrnn.seal import read_json, sealed, with_place, without_hash


def read_machines(folder: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the entries, and whether a checksum covers them; UserError if damaged."""
    path = folder / ENVIRONMENT
    try:
        entries, verified = read_json(path, list)
    except FileNotFoundError:
        return [], True
    if not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path} is damaged: not a list of machines")
    return [without_hash(entry) for entry in entries], verified


def write_machines(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Write at least one entry."""
    first, *rest = entries
    text = json.dumps([with_place(first), *rest], indent=2, allow_nan=False)
    write_whole(folder / ENVIRONMENT, sealed(f"{text}\n"))
