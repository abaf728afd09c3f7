"""What is to be prepared, what becomes of an utterance, and all that decides the bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
