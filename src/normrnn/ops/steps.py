"""The one layout: a ragged batch as rows, cut into time steps.

Shapes, here and everywhere: T time, B batch, N rows = unpadded frames, I input, H hidden,
G gates, C = G·H channels.

Rows are the data of a ``PackedSequence``: step 0 of every sequence, then step 1 of those that
have one, and so on, longest sequence first. A time step is a range of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from operator import index

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

    def __post_init__(self) -> None:
        sizes = tuple(index(n) for n in self.sizes)
        falls = all(a >= b for a, b in pairwise(sizes))
        # Only a batch without any row has steps without rows.
        if not falls or (any(sizes) and sizes[-1] < 1) or min(sizes, default=0) < 0:
            raise ValueError(
                "sizes of time steps should be positive and not rise, as the batch sizes of a "
                f"PackedSequence, got {sizes}"
            )
        object.__setattr__(self, "sizes", sizes)

    @staticmethod
    def dense(time: int, batch: int) -> "Steps":
        if torch.compiler.is_compiling():
            return Traced(time, batch, time * batch)
        return _dense(time, batch)

    @staticmethod
    def packed(batch_sizes: Tensor | Sequence[int]) -> "Steps":
        sizes = batch_sizes.tolist() if isinstance(batch_sizes, Tensor) else batch_sizes
        return _cached(tuple(sizes))

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def time(self) -> int:
        """T."""
        return len(self.sizes)

    @cached_property
    def batch(self) -> int:
        return self.sizes[0]

    @property
    def ragged(self) -> bool:
        return self.sizes[-1] != self.sizes[0]

    def may_be_lone(self, by_step: bool) -> bool:
        """Whether a step, or all of them together, may have a single row."""
        return (self.sizes[-1] if by_step else self.rows) == 1

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


class Traced(Steps):
    """Steps as a tracer sees them: numbers may be symbols, and sizes are known when it runs.

    ``batch_sizes`` (T,) of a ragged batch; it may end with zeros.
    """

    batch_sizes: Tensor | None
    padded: bool
    """Whether rows are all T·B of a padded batch, longest sequence first, not its frames alone."""
    scanned: bool
    """Whether the recurrence is shown as torch's ``scan``, not as our operator."""
    sequence_lengths: Tensor | None
    """Of a padded batch to be scanned, (B,), in any order."""

    def __init__(
        self,
        time: int,
        batch: int,
        rows: int,
        batch_sizes: Tensor | None = None,
        padded: bool = False,
        scanned: bool = False,
        sequence_lengths: Tensor | None = None,
    ):
        own = {"time": time, "batch": batch, "rows": rows, "batch_sizes": batch_sizes}
        own |= {"padded": padded, "scanned": scanned, "sequence_lengths": sequence_lengths}
        self.__dict__.update(own)

    # The inherited ones look at sizes, which are not known.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        own = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"Traced({own})"

    def may_be_lone(self, by_step: bool) -> bool:  # noqa: ARG002
        """True: an exported graph may meet other batches than the one it was traced with."""
        return True

    @property
    def runs(self) -> tuple[Run, ...]:  # type: ignore[override]
        """Of a dense batch; those of a ragged one are not known."""
        assert self.batch_sizes is None
        return (Run(0, self.time, 0, self.batch),)

    def flip(self, device: torch.device) -> Tensor:
        """Of a dense batch alone, as ``runs``."""
        assert self.batch_sizes is None
        rows = torch.arange(self.rows, device=device).view(self.time, self.batch)
        return rows.flip(0).reshape(-1)

    @property
    def frames(self) -> Tensor:
        """Which rows of a padded batch are frames, (T·B,)."""
        assert self.batch_sizes is not None
        alive = torch.arange(self.batch, device=self.batch_sizes.device)
        return (alive < self.batch_sizes[:, None]).flatten()

    @property
    def sequence_of_rows(self) -> Tensor:
        """Which sequence each row is of, (N,)."""
        rows, sizes = torch.arange(self.rows), self.batch_sizes
        if sizes is None or self.padded:
            return rows % self.batch
        starts = sizes.cumsum(0) - sizes
        return rows - starts.repeat_interleave(sizes, output_size=self.rows)


@lru_cache(maxsize=256)
def _cached(sizes: tuple[int, ...]) -> Steps:
    return Steps(sizes)


@lru_cache(maxsize=256)
def _dense(time: int, batch: int) -> Steps:
    if time < 0:
        raise ValueError(f"a batch has 0 time steps or more, got {time}")
    return _cached((batch,) * time)
