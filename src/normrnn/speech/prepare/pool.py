"""A function over many items in several processes, results in the order of the items."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

from normrnn.processes import safe_path

T = TypeVar("T")
R = TypeVar("R")
C = TypeVar("C")
_AHEAD = 4  # items in progress per process


def in_order(
    function: Callable[[T], R], items: Sequence[T], processes: int, crashed: C
) -> Iterator[R | C]:
    """Yield function(item) for each item; with more than one process in new processes.

    Where C code crashes a process, the items in progress are repeated, the first of them alone; if
    that crashes too, its result is `crashed`.
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
                result = next(_pooled(function, items[done : done + 1], 1))
            except BrokenProcessPool:
                result = crashed
            done += 1
            yield result


def _pooled(function: Callable[[T], R], items: Sequence[T], processes: int) -> Iterator[R]:
    # Not forked: the parent may hold threads.
    with safe_path():
        pool = ProcessPoolExecutor(
            processes, get_context("spawn"), initializer=_start_worker, initargs=(function,)
        )
        try:
            pending: deque[Future[R]] = deque()
            for item in items:
                pending.append(pool.submit(_call, item))
                if len(pending) >= processes * _AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_function: Callable[[Any], Any] | None = None
"""Function of a worker process: sent once, because it may have a large lexicon."""


def _start_worker(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    # Ctrl-C reaches every process of the terminal; only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _call(item: Any) -> Any:
    assert _function is not None
    return _function(item)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
