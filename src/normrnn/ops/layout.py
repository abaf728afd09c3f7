"""The layout of a batch: rows, cut into time steps.

Shapes, here and everywhere: T time, B batch, N rows = unpadded frames, I input, H hidden,
G gates, C = G·H channels, D directions.

Rows are the data of a ``PackedSequence``: step 0 of every sequence, then step 1 of those that
have one, and so on, longest sequence first. A time step is a range of rows.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


class Run(NamedTuple):
    """Consecutive steps of equal width: rows ``start : start + steps * width``."""

    first: int
    steps: int
    start: int
    width: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.steps * self.width)


class Steps:
    """How N rows fall into T time steps: step t has ``sizes[t]`` rows.

    >>> steps = Steps((3, 3, 1))
    >>> steps.time, steps.rows, steps.batch
    (3, 7, 3)
    >>> [run.rows for run in steps.runs]
    [slice(0, 6, None), slice(6, 7, None)]
    """

    time: int
    batch: int
    rows: int
    is_traced = False

    def __init__(self, sizes: Sequence[int]):
        self.sizes = sizes = tuple(map(index, sizes))
        # Only a batch without any row has steps without rows.
        falls = list(sizes) == sorted(sizes, reverse=True)
        if not falls or (sizes and sizes[-1] < (1 if sizes[0] else 0)):
            raise ValueError(
                "sizes of time steps should be positive and not rise, as the batch sizes of a "
                f"PackedSequence, got {sizes}"
            )
        self.time, self.batch, self.rows = len(sizes), sizes[0] if sizes else 0, sum(sizes)

    @staticmethod
    def dense(time: int, batch: int) -> "Steps":
        """Return the layout of a batch of equally long sequences."""
        if torch.compiler.is_compiling():
            return Traced(time, batch, time * batch)
        if time < 0:
            raise ValueError(f"a batch has 0 time steps or more, got {time}")
        return _cached((batch,) * time)

    @staticmethod
    def packed(batch_sizes: Tensor | Sequence[int]) -> "Steps":
        """Return the layout of a PackedSequence."""
        sizes = batch_sizes.tolist() if isinstance(batch_sizes, Tensor) else batch_sizes
        return _cached(tuple(sizes))

    def __repr__(self) -> str:
        return f"Steps({self.sizes})"

    @property
    def ragged(self) -> bool:
        """Whether lengths differ."""
        return self.sizes[-1] != self.sizes[0]

    def has_single_row(self, per_step: bool) -> bool:
        """Whether a step, or without ``per_step`` the whole batch, may have a single row."""
        return (self.sizes[-1] if per_step else self.rows) == 1

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first row of each step."""
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
        """The length of every sequence, longest first."""
        lengths = [0] * self.batch
        for run in self.runs:
            lengths[: run.width] = [run.first + run.steps] * run.width
        return tuple(lengths)

    @cached_property
    def native(self) -> Tensor:
        """Sizes and offsets (2, T) for the compiled kernels."""
        return torch.tensor([self.sizes, self.offsets], dtype=torch.int64, device="cpu")

    def cut(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return views of (N, …), one per step."""
        return rows.split(list(self.sizes))

    def at(self, t: int) -> "Steps":
        """Return the layout of step t alone."""
        return _cached((self.sizes[t],))

    def counts(self, per_step: bool, device: torch.device) -> Tensor:
        """Return the rows of each step, (T,), or of the batch, (1,), in float32."""
        dtype = torch.float32
        if per_step and self.ragged:
            return torch.tensor(self.sizes, dtype=dtype, device=device)
        # Filled on the device, without a copy from the host.
        shape, rows = (self.time, self.batch) if per_step else (1, self.rows)
        return torch.full((shape,), rows, dtype=dtype, device=device)


class Traced(Steps):
    """The layout as a tracer sees it: T and B may be symbols, sizes are known at run time.

    Args:
        batch_sizes: (T,) of a ragged batch; it may end with zeros.
        is_padded: whether rows are all T·B of a padded batch, longest sequence first.
        is_scanned: whether the recurrence is shown as torch's ``scan`` instead of an operator.
        sequence_lengths: (B,), in any order, of a padded batch to be scanned.
    """

    is_traced = True

    def __init__(
        self,
        time: int,
        batch: int,
        rows: int,
        batch_sizes: Tensor | None = None,
        is_padded: bool = False,
        is_scanned: bool = False,
        sequence_lengths: Tensor | None = None,
    ):
        self.time, self.batch, self.rows, self.batch_sizes = time, batch, rows, batch_sizes
        self.is_padded, self.is_scanned = is_padded, is_scanned
        self.sequence_lengths = sequence_lengths

    def __repr__(self) -> str:
        return f"Traced({', '.join(f'{name}={value}' for name, value in vars(self).items())})"

    def has_single_row(self, per_step: bool) -> bool:  # noqa: ARG002
        """True: a graph may be run with other batches than the one it was traced with."""
        return True

    @property
    def runs(self) -> tuple[Run, ...]:  # type: ignore[override]
        """The runs of a dense batch; those of a ragged one are unknown."""
        assert self.batch_sizes is None
        return (Run(0, self.time, 0, self.batch),)

    def counts(self, per_step: bool, device: torch.device) -> Tensor:
        if self.batch_sizes is not None:
            sizes = self.batch_sizes.to(device, torch.float32)
            return sizes if per_step else sizes.sum(0, keepdim=True)
        shape, rows = ((self.time,), self.batch) if per_step else ((1,), self.rows)
        return torch.full(shape, rows, dtype=torch.float32, device=device)

    @property
    def frames(self) -> Tensor:
        """Which rows of a padded batch are frames, (T·B,)."""
        assert self.batch_sizes is not None
        sequence = torch.arange(self.batch, device=self.batch_sizes.device)
        return (sequence < self.batch_sizes[:, None]).flatten()

    @property
    def sequence_of_rows(self) -> Tensor:
        """The sequence that each row belongs to, (N,)."""
        rows, sizes = torch.arange(self.rows), self.batch_sizes
        if sizes is None or self.is_padded:
            return rows % self.batch
        starts = sizes.cumsum(0) - sizes
        return rows - starts.repeat_interleave(sizes, output_size=self.rows)


def is_unknown(tensor: Any) -> bool:
    """Whether a tracer runs that does not know the numbers in a tensor."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor)


@lru_cache(maxsize=256)
def _cached(sizes: tuple[int, ...]) -> Steps:
    return Steps(sizes)
