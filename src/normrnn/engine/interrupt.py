"""Ctrl-C as a request to stop at the next safe point."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupted(Exception):  # noqa: N818  not an error: the user asked for it
    """The run was asked to stop; everything done so far is in the checkpoint."""


class Interrupt:
    """While entered, SIGINT and SIGTERM set `requested`; a second one ends the process at once.

    They can be nested: a request that came too late for the inner one reaches the outer one.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> "Interrupt":
        # Only the main thread may set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def poll(self) -> None:
        """Raise Interrupted if a stop was requested."""
        if self.requested:
            raise Interrupted

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        outer = self._before.get(number)
        self._restore()
        if isinstance(getattr(outer, "__self__", None), Interrupt) and callable(outer):
            outer(number, frame)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
