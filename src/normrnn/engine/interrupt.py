"""Ctrl-C as a request to stop at the next safe point."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop; everything done so far is in the checkpoint."""


class Interrupt:
    """While entered, SIGINT and SIGTERM set `requested`; a second one ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self._at_once = False
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> "Interrupt":
        # Only the main thread may set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise Interrupted wherever a request comes inside the block, which writes nothing."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _request(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.requested = True
        self.__exit__()
        if self._at_once:
            raise Interrupted
