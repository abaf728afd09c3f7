"""Work on utterances in several processes; each result is a file with a checksum.

A file that is torn or damaged counts as missing: its utterance is prepared again.
"""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from normrnn.errors import UserError
from normrnn.files import following_no_link, largest_tensors, read_regular
from normrnn.processes import safe_path
from normrnn.seal import BLANK, is_sealed, seal
from normrnn.speech.archive import Unusable
from normrnn.speech.prepare.job import Prepared, Utterance, Work


@dataclass(frozen=True)
class PrepareOne:
    """Prepare an utterance, write its part to a file, and return whether it was skipped."""

    work: Work
    classes: int

    def __call__(self, item: tuple[Utterance, Path]) -> bool:
        utterance, path = item
        result = Prepared(reason=utterance.problem)
        if not result.reason:
            try:
                result = self.work(utterance)
                _check(result, self.classes)
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


def _check(result: Prepared, classes: int) -> None:
    frames, labels = len(result.features), result.labels
    if len(labels) != frames:
        raise Unusable(f"its alignment has {len(labels)} frames, its features have {frames}")
    if frames == 0:
        raise Unusable("it has no frames")
    if not np.isfinite(result.features).all():
        raise Unusable("its features have values that are not finite")
    if labels.min() < 0 or labels.max() >= classes:
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise Unusable(f"its label {wrong} is outside the {classes} classes, numbered from 0")


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
