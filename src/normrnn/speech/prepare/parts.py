"""Results of single utterances, each in a sealed file, until all are there.

A file that is torn or damaged counts as missing: its utterance is prepared again.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from normrnn.errors import UserError
from normrnn.files import following_no_link, largest_tensors, read_regular
from normrnn.seal import BLANK, is_sealed, seal
from normrnn.speech.prepare.job import Prepared

PARTS = ".parts"


class Part(NamedTuple):
    """What became of an utterance: features and labels, or a reason in the record."""

    record: dict[str, Any]
    features: NDArray[np.float32]
    labels: NDArray[np.int32]


def write_part(path: Path, key: str, result: Prepared | str) -> dict[str, Any]:
    """Write what became of an utterance, or the reason why there is nothing; return the record."""
    record: dict[str, Any] = {"key": key}
    arrays = {"features": np.zeros((0, 0), "<f4"), "labels": np.zeros(0, "<i4")}
    if isinstance(result, str):
        record["reason"] = " ".join(result.split())
    else:
        record["channels"] = result.channels
        arrays = {"features": result.features.astype("<f4"), "labels": result.labels.astype("<i4")}
    content = bytearray(save(arrays, {"sha256": BLANK, "record": json.dumps(record)}))
    seal(content)
    with open(path, "wb", opener=following_no_link) as file:
        file.write(content)
    return record


def read_part(path: Path, key: str) -> Part | None:
    """Read the part of an utterance; None if it is missing, damaged or of another utterance."""
    try:
        content = read_regular(path, largest_tensors())
        if not is_sealed(content, path):
            return None
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        record, arrays = json.loads(header["__metadata__"]["record"]), load(content)
    except (OSError, UserError, SafetensorError, ValueError, LookupError):
        return None
    return Part(record, arrays["features"], arrays["labels"]) if record["key"] == key else None
