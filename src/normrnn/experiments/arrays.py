"""Arrays given in Python as an .npz file, which the processes of a comparison read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from normrnn.arrays.read import KEYS, prepare
from normrnn.config.base import Config
from normrnn.errors import UserError
from normrnn.files import replacing


def array_parts(given: Mapping[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays among arguments, and remove them from the settings."""
    named = {name: settings.pop(name) for name in KEYS & settings.keys()}
    return {name: _plain(v) for name, v in {**given, **named}.items() if v is not None}


def _plain(value: Any) -> Any:
    """Return tensors, and lists of them, as arrays; anything else as it is."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "detach"):  # a tensor of torch
        return value.detach().cpu().numpy()
    if hasattr(value, "to_numpy"):  # of pandas
        return value.to_numpy()
    return value


def write_arrays(parts: Mapping[str, Any], config: Config, out: Path) -> Path:
    """Check arrays and write them to a file in `out`, named by their content; return its path.

    UserError, before anything is written, for arrays that cannot be trained on.
    """
    checked = prepare(parts, config.arrays)  # type: ignore[attr-defined]
    path = out / f"data-{checked.sha256[:12]}.npz"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, **_without_objects(parts))
    return path


def _without_objects(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return ragged sequences as concatenated rows with their lengths, and plain arrays."""
    found: dict[str, Any] = {}
    for name, value in parts.items():
        is_ragged = isinstance(value, list) or np.asarray(value).dtype.kind == "O"
        if name.startswith("x") and is_ragged:
            pieces = [np.asarray(one) for one in value]
            found[name] = np.concatenate(pieces)
            found[name.replace("x", "lengths", 1)] = np.array([len(piece) for piece in pieces])
        elif name.startswith("y") and is_ragged and len(value) and np.ndim(value[0]):
            found[name] = np.concatenate([np.asarray(one) for one in value])
        else:
            found[name] = np.asarray(list(value) if is_ragged else value)
        if found[name].dtype == object:
            raise UserError(f"{name} holds Python objects; expected numbers or strings")
    return found
