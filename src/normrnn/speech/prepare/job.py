"""What a preparation consists of: utterances, the work on each, and processes that do it.

Each result is a file with a checksum. A file that is torn or damaged counts as missing: its
utterance is prepared again.
"""

import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from normrnn.errors import UsageError, UserError
from normrnn.files import (
    BLANK,
    following_no_link,
    is_sealed,
    largest_tensors,
    open_regular,
    read_regular,
    read_text,
    seal,
)
from normrnn.processes import safe_path
from normrnn.speech.archive import Unusable

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


@dataclass(frozen=True)
class PrepareOne:
    """Prepare an utterance, write its part to a file, and return whether it was skipped."""

    work: Work

    def __call__(self, item: tuple[Utterance, Path]) -> bool:
        utterance, path = item
        result = Prepared(reason=utterance.problem)
        if not result.reason:
            try:
                result = self.work(utterance)
                _check(result)
            except Unusable as error:
                result = Prepared(reason=" ".join(str(error).split()))
        record = json.dumps({"key": utterance.key, "reason": result.reason})
        arrays = {"features": result.features.astype("<f4"), "labels": result.labels.astype("<i4")}
        content = bytearray(save(arrays, {"sha256": BLANK, "record": record}))
        seal(content)
        with open(path, "wb", opener=following_no_link) as file:
            file.write(content)
        return bool(result.reason)


def read_part(path: Path, key: str) -> Prepared | None:
    """Read the part of an utterance; None if it is missing, damaged or of another utterance."""
    try:
        content = read_regular(path, largest_tensors())
        if not is_sealed(content, path):
            return None
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        record, arrays = json.loads(header["__metadata__"]["record"]), load(content)
    except (OSError, UserError, SafetensorError, ValueError, LookupError):
        return None
    if record["key"] != key:
        return None
    return Prepared(arrays["features"], arrays["labels"], record["reason"])


def _check(result: Prepared) -> None:
    frames, labels = len(result.features), len(result.labels)
    if labels != frames:
        raise Unusable(f"its alignment has {labels} frames, its features have {frames}")
    if frames == 0:
        raise Unusable("it has no frames")
    if not np.isfinite(result.features).all():
        raise Unusable("its features have values that are not finite")


def in_order(
    function: Callable[[Any], Any], items: Sequence[Any], processes: int
) -> Iterator[Any | None]:
    """Yield function(item) for each item; with more than one process in new processes.

    Where C code crashes a process, the first item in progress is repeated alone; if that crashes
    too, its result is None.
    """
    if processes <= 1:
        yield from map(function, items)
        return
    done = 0
    while done < len(items):
        try:
            for result in _pooled(function, items[done:], processes):
                done += 1
                yield result
        except BrokenProcessPool:
            try:
                (result,) = _pooled(function, items[done : done + 1], 1)
            except BrokenProcessPool:
                result = None
            done += 1
            yield result


def _pooled(function: Callable[[Any], Any], items: Sequence[Any], processes: int) -> Iterator[Any]:
    # Not forked: the parent may hold threads.
    with (
        safe_path(),
        ProcessPoolExecutor(processes, get_context("spawn"), _start, (function,)) as pool,
    ):
        yield from pool.map(_call, items)


_function: Callable[[Any], Any] | None = None
"""Function of a worker process: sent once, because it may have a large lexicon."""


def _start(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    # Ctrl-C reaches every process of the terminal; only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _call(item: Any) -> Any:
    assert _function is not None
    return _function(item)


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)
