"""Means and variances over rows, pooled by count, alone or over the ranks of a process group.

A *group* is what shares one mean and variance: all N rows (sequence-wise) or those of one time
step (frame-wise). Statistics are held as (K, C) for K groups, always in float32 or wider, and
always two-pass: the mean first, then the centred squares.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normrnn.ops.layout import Run, Steps
from normrnn.ops.sync import Pool

Given = tuple[Tensor, Tensor]
"""Mean and variance that do not come from the batch, each (1, C) or (K, C)."""
SINGLE_ROW = (
    "a time step with a single row is normalised with running statistics, and there are none: "
    "construct the layer with track_running_stats=True, or drop the single rows"
)
CONSTANT = 1e-12
"""Rows of a step are equal if their variance, relative to the square of the mean, is not above.
Rounding leaves up to 1e-13 in float32. `native/columns.h` has the same number."""


class Statistics(NamedTuple):
    """Mean and biased variance (K, C) over ``count`` (K,) rows of each group."""

    mean: Tensor
    var: Tensor
    count: Tensor  # type: ignore[assignment]


@dataclass(frozen=True)
class Groups:
    """Which rows share statistics: runs of K equally wide groups."""

    runs: tuple[Run, ...]
    is_single: bool = False
    """Whether there is one group on every rank, so that ranks need not agree on a number."""

    @staticmethod
    def sequence(steps: Steps) -> "Groups":
        return Groups((Run(0, 1, 0, steps.rows),), is_single=True)

    @staticmethod
    def frame(steps: Steps) -> "Groups":
        return Groups(steps.runs)

    def __len__(self) -> int:
        return self.runs[-1].first + self.runs[-1].steps

    @property
    def has_single_rows(self) -> bool:
        """Whether a group has one row."""
        return min(run.width for run in self.runs) == 1

    def view(self, run: Run, rows: Tensor) -> Tensor:
        """(N, C) -> (groups of the run, width, C)."""
        return rows[run.rows].unflatten(0, (run.steps, run.width))

    def sums(self, rows: Tensor) -> Tensor:
        """(N, C) -> (K, C)."""
        parts = [self.view(run, rows).sum(1) for run in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def each(self, rows: Tensor, values: Tensor, f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Apply ``f`` to every row of (N, C) and the values (K, C) of its group: (N, C)."""
        parts = [
            f(self.view(run, rows), values[run.first : run.first + run.steps, None]).flatten(0, 1)
            for run in self.runs
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type statistics are computed in: float32 or wider."""
    return dtype if dtype == torch.float64 else torch.float32


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Disable autocast on a kind of device that has it."""
    is_available = torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if is_available else nullcontext()


def measure(rows: Tensor, groups: Groups, pool: Pool | None = None) -> tuple[Statistics, Tensor]:
    """Return the statistics of every group, and the centred rows (N, C).

    Differentiable, any number of times. With a ``pool`` statistics are those of all its ranks,
    which may hold different T: K is the largest, and a rank without rows at a step counts nothing.
    """
    rows = rows.to(wide(rows.dtype))
    # Filled on the device: a tensor made of a list is copied there, at every step of a loop.
    count = torch.cat([rows.new_full((run.steps,), run.width) for run in groups.runs])
    sums = groups.sums(rows)
    if pool is not None:
        most = 1 if groups.is_single else pool.max(len(groups), rows.device)
        both = pool.sum(torch.cat([sums, count[:, None]], 1), most)
        sums, count = both[:, :-1], both[:, -1].detach()
    mean = sums / count[:, None]
    centred = groups.each(rows, mean, torch.sub)
    squares = groups.sums(centred.square())
    if pool is not None:
        squares = pool.sum(squares, len(count))
    return Statistics(mean, squares / count[:, None], count), centred


def constant_groups(batch: Statistics, directions: int = 1) -> Tensor:
    """Return which groups have several rows that are all equal, up to rounding: (K, directions),
    each judged by its own channels together."""
    var, square = (
        v.unflatten(1, (directions, -1)).sum(2) for v in (batch.var, batch.mean.square())
    )
    return (batch.count > 1)[:, None] & (var <= CONSTANT * square)


def with_given(
    batch: Statistics,
    centred: Tensor,
    rows: Tensor,
    groups: Groups,
    given: Given | None,
    directions: int = 0,
    is_pooled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Replace statistics by ``given`` ones where a group has no variance of its own: a single row
    or, with ``directions``, rows that are all equal, as at a start token.

    Counts that are pooled over ranks are known on the device only.

    Returns:
        Variance and centred rows. Without ``given`` a single row is an error.
    """
    is_single = batch.count <= 1
    if given is None:
        if bool(is_single.any()) if is_pooled else groups.has_single_rows:
            raise ValueError(SINGLE_ROW)
        return batch.var, centred
    if not (is_pooled or directions or groups.has_single_rows):
        return batch.var, centred
    has_variance = ~is_single[:, None].expand_as(batch.mean)
    if directions:
        width = batch.mean.shape[1] // directions
        constant = constant_groups(batch, directions).repeat_interleave(width, 1)
        has_variance = has_variance & ~constant
    mean, var = (
        torch.where(has_variance, value, _for_groups(other.to(value.dtype), len(value)))
        for other, value in zip(given, batch[:2], strict=True)
    )
    return var, groups.each(rows, mean, torch.sub)


def _for_groups(given: Tensor, groups: int) -> Tensor:
    """Extend given statistics to the largest T of all ranks by repeating the last row."""
    missing = groups - len(given)
    if len(given) > 1 and missing > 0:
        given = torch.cat([given, given[-1:].expand(missing, -1)])
    return given


def pool(statistics: Statistics) -> Statistics:
    """Merge K groups into one, weighted by their counts, which may differ by channel, (K, C)."""
    if len(statistics.mean) == 1:
        return statistics
    count = statistics.count.sum(0, keepdim=True)
    share = _by_channel(statistics.count / count.clamp(min=1))
    # A group that counts nothing may hold anything, NaN included.
    each = torch.where(share > 0, statistics.mean, 0)
    mean = (each * share).sum(0, keepdim=True)
    var = torch.where(share > 0, statistics.var, 0) + (each - mean).square()
    var = (var * share).sum(0, keepdim=True)
    return Statistics(mean, var, count)


def without_constant(statistics: Statistics, inputs: int) -> Statistics:
    """Set counts to zero where rows of a group are all equal, in the first ``inputs`` channels.

    Those channels hold statistics of W_x x. The counts become (K, C).
    """
    if not inputs:
        return statistics
    mean, var, count = statistics
    constant = constant_groups(Statistics(mean[:, :inputs], var[:, :inputs], count))
    counts = count[:, None].expand_as(mean)
    channel = torch.arange(mean.shape[1], device=mean.device)
    return Statistics(mean, var, counts.masked_fill(constant & (channel < inputs), 0))


def unbiased(statistics: Statistics) -> Tensor:
    """Return the variance that running buffers hold (torch's convention)."""
    return statistics.var * _by_channel(statistics.count / (statistics.count - 1).clamp(min=1))


def _by_channel(count: Tensor) -> Tensor:
    return count if count.dim() == 2 else count[:, None]
