"""What is to be prepared, what becomes of an utterance, and all that decides the bytes."""

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
    """What to prepare; `problem` is why it cannot be, if that is known already."""

    key: str
    speaker: str
    split: str
    text: str
    source: Any
    problem: str = ""


@dataclass(frozen=True)
class Prepared:
    """Features (T, D) and labels (T,), the length of the sound, and what each cost in seconds."""

    features: NDArray[np.float32]
    labels: NDArray[np.int32]
    seconds: float
    feature_seconds: float = 0.0
    alignment_seconds: float = 0.0
    channels: int = 1


_SAMPLE = 4096


def sample(path: Path, offset: int | None) -> bytes:
    """Stands for the content of a file: its size, and what is at its beginning, middle and end, or
    at an offset; nothing if it cannot be read."""
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
    """All that decides the bytes of a prepared directory."""

    settings: dict[str, Any]
    """What a later start must agree with; goes into the summary."""
    source: dict[str, Any]
    """Where the data was found: it may move. Goes into the summary too."""
    utterances: Sequence[Utterance]
    """In the order of their keys."""
    work: Work
    classes: int
