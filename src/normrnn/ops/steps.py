"""The one layout: a ragged batch as rows, cut into time steps.

Shapes, here and everywhere: T time, B batch, N rows = unpadded frames, I input, H hidden,
G gates, C = G·H channels.

Rows are the data of a ``PackedSequence``: step 0 of every sequence, then step 1 of those that
have one, and so on, longest sequence first. A time step is a range of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Consecutive steps of equal width: rows ``start : start + steps * width``."""

    first: int
    steps: int
    start: int
    width: int

    @property
    def stop(self) -> int:
        return self.start + self.steps * self.width

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Steps:
    """How N rows fall into T time steps: ``sizes[t]`` sequences are alive at step t.

    >>> steps = Steps((3, 3, 1))
    >>> steps.rows, steps.batch, steps.ragged
    (7, 3, True)
    >>> [run.rows for run in steps.runs]
    [slice(0, 6, None), slice(6, 7, None)]
    """

    sizes: tuple[int, ...]

    @staticmethod
    def dense(time: int, batch: int) -> "Steps":
        return _cached((batch,) * time)

    @staticmethod
    def packed(batch_sizes: Tensor | Sequence[int]) -> "Steps":
        sizes = batch_sizes.tolist() if isinstance(batch_sizes, Tensor) else batch_sizes
        return _cached(tuple(sizes))

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def batch(self) -> int:
        return self.sizes[0]

    @property
    def ragged(self) -> bool:
        return self.sizes[-1] != self.sizes[0]

    @cached_property
    def rows(self) -> int:
        return sum(self.sizes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each step begins."""
        return tuple(accumulate(self.sizes[:-1], initial=0))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        runs, first, start = [], 0, 0
        for width, group in groupby(self.sizes):
            count = len(list(group))
            runs.append(Run(first, count, start, width))
            first, start = first + count, start + count * width
        return tuple(runs)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Length of every sequence, longest first."""
        lengths = [0] * self.batch
        for run in self.runs:
            lengths[: run.width] = [run.first + run.steps] * run.width
        return tuple(lengths)

    def cut(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Views of (N, …), one per step."""
        return rows.split(list(self.sizes))

    def at(self, t: int) -> "Steps":
        """Step t alone."""
        return _cached((self.sizes[t],))

    def order(self, reverse: bool) -> range:
        """Time steps in the order a direction visits them."""
        return range(len(self) - 1, -1, -1) if reverse else range(len(self))

    def flip(self, device: torch.device) -> Tensor:
        """The index of rows that turns every sequence round over its own length, (N,).

        >>> Steps((2, 1)).flip(torch.device("cpu")).tolist()
        [2, 1, 0]
        """
        step = torch.repeat_interleave(torch.arange(len(self)), torch.tensor(self.sizes))
        sequence = torch.arange(self.rows) - torch.tensor(self.offsets)[step]
        mirrored = torch.tensor(self.lengths)[sequence] - 1 - step
        return (torch.tensor(self.offsets)[mirrored] + sequence).to(device)


@lru_cache(maxsize=256)
def _cached(sizes: tuple[int, ...]) -> Steps:
    return Steps(sizes)
