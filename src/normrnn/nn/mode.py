"""Which statistics a normaliser uses and what becomes of them: one visible mode.

Evaluating with other statistics is a matter of who asks, not of the model: the mode that
``batch_statistics`` and ``recalibrate`` ask for is held in a context variable, so that another
thread that runs the same model sees nothing of it. Compilers do not look into context variables:
while anybody asks, what was compiled runs eagerly.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any

from torch import nn

from normrnn.nn import tracing


@dataclass(frozen=True)
class Mode:
    """What happens in the next pass."""

    batch: bool
    """Normalise with the batch's own statistics; else with those of test time."""
    update: bool = False
    """Take them to the running ones."""
    population: Any = None
    """Gather them here."""


TRAIN = Mode(batch=True, update=True)
BATCH = Mode(batch=True)
TEST = Mode(batch=False)

_asked: ContextVar[Mapping[nn.Module, Mode]] = ContextVar("modes", default={})  # noqa: B039


_asking = 0
"""How many ask, in all threads. Compiled graphs hold as long as nobody does."""
_compile_again: Callable[[], Any] | None = None
"""The way back, where compiled models were told to run eagerly."""
_lock = Lock()


def asked_of(module: nn.Module) -> Mode | None:
    """The mode that the surrounding ``with`` asks of a normaliser; None: by its own."""
    return _asked.get().get(module) if _asking else None


@contextmanager
def asking(modes: Mapping[nn.Module, Mode]) -> Iterator[None]:
    """Inside, in this thread, these normalisers run in these modes."""
    token = _asked.set({**_asked.get(), **modes})
    try:
        _begin()
        try:
            yield
        finally:
            _end()
    finally:
        _asked.reset(token)


def _begin() -> None:
    """Whoever asks first has compiled models run eagerly: torch tells that to all threads, so it
    lasts until the last one has ended."""
    global _asking, _compile_again
    with _lock:
        if _compile_again is None:
            _compile_again = tracing.run_eagerly()
        _asking += 1


def _end() -> None:
    global _asking, _compile_again
    with _lock:
        _asking -= 1
        if not _asking and _compile_again is not None:
            back, _compile_again = _compile_again, None
            back()
