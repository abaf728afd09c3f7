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

from normrnn.errors import UserError

T = TypeVar("T")
R = TypeVar("R")
_AHEAD = 4  # items per process that are under way: enough to bridge a long one


def in_order(function: Callable[[T], R], items: Sequence[T], processes: int) -> Iterator[R]:
    """function(item) for each item; one process works here, more work in fresh processes."""
    if processes <= 1:
        yield from map(function, items)
        return
    # Not forked: the parent may hold threads.
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
    except BrokenProcessPool:
        raise UserError(
            "a working process was ended from outside (out of memory?); what was prepared is kept:"
            " start again to go on, with fewer --processes if memory is short"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_function: Callable[[Any], Any] | None = None
"""Of a working process: sent once, as it may carry a large lexicon."""


def _start_worker(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    # Ctrl-C reaches every process of the terminal; the parent alone decides what it means.
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
