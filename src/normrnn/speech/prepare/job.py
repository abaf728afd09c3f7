"""What a preparation consists of: utterances, the work on each, and settings."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normrnn.files import open_regular


@dataclass(frozen=True)
class Utterance:
    """An utterance to prepare; `problem` is why it cannot be, if known already."""

    key: str
    speaker: str
    split: str
    text: str
    source: Any
    problem: str = ""


@dataclass(frozen=True)
class Prepared:
    """Features (T, D) and labels (T,), and the channels of the sound."""

    features: NDArray[np.float32]
    labels: NDArray[np.int32]
    channels: int = 1


_SAMPLE = 4096


def sample(path: Path, offset: int | None) -> bytes:
    """Return the size of a file and some bytes at its start, middle and end, or at an offset;
    nothing if it cannot be read."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            parts = [str(size).encode()]
            for at in (0, size // 2, max(size - _SAMPLE, 0)) if offset is None else (offset,):
                file.seek(at)
                parts.append(file.read(_SAMPLE))
    except OSError:
        return b""
    return b" ".join(parts)


Work = Callable[[Utterance], Prepared]
"""Prepares one utterance or raises Unusable; sent to other processes."""


@dataclass(frozen=True)
class Job:
    """Everything that determines the bytes of a prepared directory."""

    settings: dict[str, Any]
    """Settings that a later start must have too; they go into the summary."""
    source: dict[str, Any]
    """Place of the data, which may move; it goes into the summary too."""
    utterances: Sequence[Utterance]
    """In the order of their keys."""
    work: Work
    classes: int
