"""What every normaliser offers that keeps statistics for test time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normrnn.nn.mode import BATCH, TEST, TRAIN, Mode, asked_of, asking
from normrnn.nn.normaliser import GateNorm


class StatisticalNorm(GateNorm):
    """In training it uses the batch's statistics and updates the running ones; in eval mode it
    uses the running ones (the batch's own if there are none, as torch's BatchNorm does)."""

    running_mean: Tensor | None
    num_batches_tracked: Tensor | None
    time_steps: int | None = None

    def reset_parameters(self) -> None:
        """γ to its initial value, β to 0, statistics forgotten."""
        super().reset_parameters()
        self.reset_running_stats()

    def reset_running_stats(self) -> None:
        """To mean 0 and variance 1."""
        raise NotImplementedError

    @property
    def mode(self) -> Mode:
        """What the next forward pass does with statistics."""
        mode = asked_of(self) or (TRAIN if self.training else TEST)
        if self.running_mean is None:
            mode = replace(mode, batch=True, update=False)
        return mode

    @property
    def is_fixed(self) -> bool:
        mode = self.mode
        return not mode.batch and mode.population is None

    @property
    def never_updated(self) -> bool:
        tracked = self.num_batches_tracked
        if tracked is None or tracked.is_meta or torch.compiler.is_compiling():
            return False  # a graph cannot depend on what is in a buffer
        return not bool(tracked.any())

    def population(self, shared: bool = False) -> Any:
        """An empty one with room for these statistics; ``shared``: all time steps as one."""
        raise NotImplementedError

    def share(self) -> None:
        """One slot for all time steps instead of one each, to be filled by ``adopt``."""
        raise NotImplementedError

    def adopt(self, population: Any) -> None:
        """Makes population statistics the running ones."""
        raise NotImplementedError


@contextmanager
def by_batch(normalisers: Sequence[StatisticalNorm]) -> Iterator[None]:
    """Batch statistics whatever the mode; nothing is updated."""
    with asking(dict.fromkeys(normalisers, BATCH)):
        yield


@contextmanager
def collecting(
    normalisers: Sequence[StatisticalNorm], use: bool = True, shared: bool = False
) -> Iterator[list[Any]]:
    """Gathers batch statistics into populations; ``use``: and normalises with them.

    ``shared``: all time steps as one, also where there is a slot for each.
    """
    populations = [n.population(shared) for n in normalisers]
    modes = [Mode(batch=use, population=p) for p in populations]
    with asking(dict(zip(normalisers, modes, strict=True))):
        yield populations
