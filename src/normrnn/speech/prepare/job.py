"""What a preparation consists of: utterances, the work on each, and settings."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normrnn.errors import UsageError, UserError
from normrnn.files import open_regular, read_text

_SAMPLE = 4096


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
    """Features (T, D) and labels (T,) of an utterance, or the reason why there are none."""

    features: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    labels: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    reason: str = ""


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


def sample(path: Path, offset: int | None = None) -> bytes:
    """Return the size of a file and some bytes at its middle or at an offset; nothing if it cannot
    be read. Hashed instead of the content, which may be very large."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(size // 2 if offset is None else offset)
            return str(size).encode() + file.read(_SAMPLE)
    except OSError:
        return b""


def fingerprint(utterances: Sequence[Utterance], content: Callable[[Utterance], bytes]) -> str:
    """Return a hash of utterances and of the content of each."""
    hashed = hashlib.sha256()
    for u in utterances:
        hashed.update(repr((u.key, u.speaker, u.split, u.text, u.problem)).encode())
        hashed.update(content(u))
    return hashed.hexdigest()


def split_speakers(
    utterances: Sequence[Utterance], listed: Path | None, fraction: float
) -> tuple[list[Utterance], dict[str, Any]]:
    """Move the development speakers' utterances to dev; return also the settings of the choice.

    Speakers are those listed in a file, or a fraction of all with usable utterances: those whose
    names have the smallest hashes, which are the same on every machine.
    """
    names = {u.speaker for u in utterances if u.speaker and (listed or not u.problem)}
    settings: dict[str, Any] = {"dev_fraction": fraction}
    if listed:
        dev = set(read_text(listed).split())
        if unknown := sorted(dev - names):
            raise UserError(f"{listed} names speakers not in the data: {', '.join(unknown)}")
        settings = {"dev_speakers": " ".join(sorted(dev))}
    else:
        if not 0 < fraction < 1:
            raise UsageError(f"--dev-fraction must lie between 0 and 1, not {fraction}")
        count = min(max(round(fraction * len(names)), 1), len(names) - 1)
        by_hash = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
        dev = set(by_hash[: max(count, 0)])
    if not dev or dev == names:
        raise UserError(
            f"{len(dev)} of {len(names)} speakers are for development; train and dev need at"
            " least one each"
        )
    return [replace(u, split="dev") if u.speaker in dev else u for u in utterances], settings
