"""The one layout: a ragged batch as rows, cut into time steps.

Shapes, here and everywhere: T time, B batch, N rows = unpadded frames, I input, H hidden,
G gates, C = G·H channels.

Rows are the data of a ``PackedSequence``: step 0 of every sequence, then step 1 of those that
have one, and so on, longest sequence first. Inside the recurrence the same numbers are held
feature-major, ``(features, N)``: a time step is then a range of columns, every gate is a
contiguous block of rows, and ``W @ h`` is the faster of the two skinny matrix products on a CPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Consecutive steps of equal width: columns ``start : start + steps * width``."""

    first: int
    steps: int
    start: int
    width: int

    @property
    def stop(self) -> int:
        return self.start + self.steps * self.width

    @property
    def columns(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Steps:
    """How N rows fall into T time steps: ``sizes[t]`` sequences are alive at step t.

    >>> steps = Steps((3, 3, 1))
    >>> steps.rows, steps.batch, steps.ragged
    (7, 3, True)
    >>> [run.columns for run in steps.runs]
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

    def cut(self, columns: Tensor) -> tuple[Tensor, ...]:
        """Views of (…, N), one per step."""
        return columns.split(list(self.sizes), -1)

    def order(self, reverse: bool) -> range:
        """Time steps in the order a direction visits them."""
        return range(len(self) - 1, -1, -1) if reverse else range(len(self))

    def final(self, states: Tensor, reverse: bool) -> Tensor:
        """The state each sequence ends with, (H, N) -> (H, B).

        Backwards in time every sequence ends at frame 0, forwards at its own last frame.
        """
        if reverse:
            return states[:, : self.batch]
        if not self.ragged:
            return states[:, -self.batch :]
        return states.index_select(1, self._last_columns(states.device))

    def _last_columns(self, device: torch.device) -> Tensor:
        last = [self.offsets[n - 1] + b for b, n in enumerate(self.lengths)]
        return torch.tensor(last, device=device)

    def flip(self, device: torch.device) -> Tensor:
        """The index of rows that turns every sequence round over its own length, (N,).

        >>> Steps((2, 1)).flip(torch.device("cpu")).tolist()
        [2, 1, 0]
        """
        step = torch.repeat_interleave(torch.arange(len(self)), torch.tensor(self.sizes))
        sequence = torch.arange(self.rows) - torch.tensor(self.offsets)[step]
        mirrored = torch.tensor(self.lengths)[sequence] - 1 - step
        return (torch.tensor(self.offsets)[mirrored] + sequence).to(device)

    def previous(
        self, states: Tensor, start: Tensor | None, reverse: bool
    ) -> Iterator[tuple[slice, Tensor]]:
        """Pairs (columns, the state before them) that together cover all N columns.

        ``states`` (H, N) are the states after every step and ``start`` (H, B) the initial one;
        if that is None, the columns it stands before are left out. A run of equal widths is one
        pair, shifted by a step; its entry is another one or two.
        """
        runs = self.runs
        for k, run in enumerate(runs):
            b = run.width
            inner = slice(run.start + b, run.stop)
            if reverse:
                entry = run.stop - b
                after = runs[k + 1].width if k + 1 < len(runs) else 0
                if run.steps > 1:
                    yield slice(run.start, entry), states[:, inner]
                if after:
                    yield slice(entry, entry + after), states[:, run.stop : run.stop + after]
                if start is not None:
                    yield slice(entry + after, run.stop), start[:, after:b]
            else:
                entry = slice(run.start, run.start + b)
                if k:
                    begin = run.start - runs[k - 1].width
                    yield entry, states[:, begin : begin + b]
                elif start is not None:
                    yield entry, start
                if run.steps > 1:
                    yield inner, states[:, run.start : run.stop - b]


@lru_cache(maxsize=256)
def _cached(sizes: tuple[int, ...]) -> Steps:
    return Steps(sizes)
