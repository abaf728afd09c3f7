"""Results of single utterances, each in a file with its hash, until all are there.

A file that is torn or damaged counts as missing: its utterance is prepared again.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normrnn.files import following_no_link, largest_tensors, read_regular
from normrnn.speech.prepare.job import Prepared

PARTS = ".parts"
_HASH = 32


class Part(NamedTuple):
    """What became of an utterance: features and labels, or a reason in the record."""

    record: dict[str, Any]
    features: NDArray[np.float32]
    labels: NDArray[np.int32]


def write_part(path: Path, key: str, result: Prepared | str) -> dict[str, Any]:
    """Write what became of an utterance, or the reason why there is nothing; return the record."""
    record: dict[str, Any] = {"key": key}
    body = b""
    if isinstance(result, str):
        record["reason"] = " ".join(result.split())
    else:
        record["shape"] = result.features.shape
        cost = result.seconds, result.feature_seconds, result.alignment_seconds
        record["cost"] = [round(seconds, 6) for seconds in cost]
        record["channels"] = result.channels
        body = result.features.astype("<f4").tobytes() + result.labels.astype("<i4").tobytes()
    content = json.dumps(record).encode() + b"\n" + body
    with open(path, "wb", opener=following_no_link) as file:
        file.write(hashlib.sha256(content).digest() + content)
    return record


def read_part(path: Path, key: str) -> Part | None:
    """Read the part of an utterance; None if it is missing, damaged or of another utterance."""
    try:
        raw = read_regular(path, largest_tensors())
    except OSError:
        return None
    content = raw[_HASH:]
    if hashlib.sha256(content).digest() != raw[:_HASH]:
        return None
    head, _, body = content.partition(b"\n")
    record = json.loads(head)
    if record["key"] != key:
        return None
    frames, columns = record.get("shape", (0, 0))
    features = np.frombuffer(body, "<f4", frames * columns).reshape(frames, columns)
    return Part(record, features, np.frombuffer(body, "<i4", frames, features.nbytes))
