"""Which statistics a normaliser uses and what becomes of them: one visible mode.

Evaluating with other statistics is a matter of who asks, not of the model: the mode that
``batch_statistics`` and ``recalibrate`` ask for is held in a context variable, so that another
thread that runs the same model sees nothing of it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any

from torch import nn


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
"""How many ask, in all threads: compilers do not look into context variables, and need not
where nobody asks."""
_lock = Lock()


def asked_of(module: nn.Module) -> Mode | None:
    """The mode that the surrounding ``with`` asks of a normaliser; None: by its own."""
    return _asked.get().get(module) if _asking else None


@contextmanager
def asking(modes: Mapping[nn.Module, Mode]) -> Iterator[None]:
    """Inside, in this thread, these normalisers run in these modes."""
    token = _asked.set({**_asked.get(), **modes})
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        _asked.reset(token)


def _count(more: int) -> None:
    global _asking
    with _lock:
        _asking += more
