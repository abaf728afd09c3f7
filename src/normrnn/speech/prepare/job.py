"""What is prepared: utterances and the work on each, in several processes.

Without torch: fresh processes import this.
"""

import hashlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normrnn.errors import UsageError, UserError
from normrnn.files import open_regular, read_text
from normrnn.processes import PARENT, stop_with_parent
from normrnn.speech.archive import Unusable

_SAMPLE = 4096
CRASHED = "the process that worked on it crashed, twice"


@dataclass(frozen=True)
class Utterance:
    """An utterance to prepare; `problem` is why it cannot be, if known already."""

    key: str
    speaker: str
    text: str
    path: Path = Path()  # file with its sound or features
    offset: int = 0  # where its features begin in the file
    labels: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))  # if known
    problem: str = ""
    split: str = "train"


Prepared = tuple[NDArray[np.float32], NDArray[np.int32]]
"""Features (T, D) and labels (T,) of an utterance."""
Work = Callable[[Utterance], Prepared]
"""Prepares one utterance or raises Unusable; sent to other processes."""


@dataclass(frozen=True)
class Job:
    """Everything that determines the bytes of a prepared directory."""

    settings: dict[str, Any]  # a later start must have the same
    utterances: Sequence[Utterance]  # in the order of their keys
    work: Work
    classes: int


def fingerprint(utterances: Sequence[Utterance]) -> str:
    """Return a hash of utterances and of samples of their files: the size of each and some bytes,
    since the content may be very large. A FLAC file begins with a hash of its sound."""
    hashed = hashlib.sha256()
    for u in utterances:
        hashed.update(repr((u.key, u.speaker, u.split, u.text, u.problem)).encode())
        hashed.update(u.labels.tobytes())
        with suppress(OSError), open_regular(u.path) as file:  # errors come when it is prepared
            hashed.update(str(file.seek(0, os.SEEK_END)).encode())
            file.seek(u.offset)
            hashed.update(file.read(_SAMPLE))
    return hashed.hexdigest()


def split_speakers(
    utterances: Sequence[Utterance], listed: Path | None, fraction: float
) -> list[Utterance]:
    """Move the development speakers' utterances to dev.

    Speakers are those listed in a file, or a fraction of all with usable utterances: those whose
    names have the smallest hashes, which are the same on every machine.
    """
    names = {u.speaker for u in utterances if u.speaker and (listed or not u.problem)}
    if listed:
        dev = set(read_text(listed).split())
        if unknown := sorted(dev - names):
            raise UserError(f"{listed} names speakers not in the data: {', '.join(unknown)}")
    else:
        if not 0 < fraction < 1:
            raise UsageError(f"--dev-fraction must lie between 0 and 1, not {fraction}")
        by_hash = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
        count = min(max(round(fraction * len(names)), 1), len(names) - 1)
        dev = set(by_hash[: max(count, 0)])
    if not dev or dev == names:
        raise UserError(
            f"{len(dev)} of {len(names)} speakers are for development; train and dev need at"
            " least one each"
        )
    return [replace(u, split="dev") if u.speaker in dev else u for u in utterances]


def prepare_one(work: Work, utterance: Utterance) -> Prepared | str:
    """Return the features and labels of an utterance, or why there are none."""
    if utterance.problem:
        return utterance.problem
    try:
        features, labels = work(utterance)
    except Unusable as error:
        return " ".join(str(error).split())
    if len(labels) != len(features):
        return f"its alignment has {len(labels)} frames, its features have {len(features)}"
    if not len(features):
        return "it has no frames"
    if not np.isfinite(features).all():
        return "its features have values that are not finite"
    return features.astype("<f4"), labels.astype("<i4")


def in_order(function: Callable[[Any], Any], items: Sequence[Any], processes: int) -> Iterator[Any]:
    """Yield function(item) for each item; with more than one process in new processes.

    Where C code crashes a process, the first item in progress is repeated alone; if that crashes
    too, its result is CRASHED.
    """
    if processes <= 1:
        yield from map(function, items)
        return
    done, crashed = 0, False
    while done < len(items):
        some, workers = (items[done : done + 1], 1) if crashed else (items[done:], processes)
        try:
            os.environ["PYTHONSAFEPATH"] = "1"  # nothing is imported from the current directory
            # Not forked: the parent may hold threads.
            context, parent = get_context("spawn"), str(os.getpid())
            with ProcessPoolExecutor(workers, context, _start, (parent,)) as pool:
                for result in pool.map(function, some):
                    done += 1
                    yield result
            crashed = False
        except BrokenProcessPool:
            if crashed:
                done += 1
                yield CRASHED
            crashed = not crashed


def _start(parent: str) -> None:
    # Ctrl-C reaches every process of the terminal; only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ[PARENT] = parent
    stop_with_parent()
