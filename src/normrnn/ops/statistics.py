"""Means and variances over rows, pooled by count, alone or over the ranks of a process group.

A *group* is what shares one mean and variance: all N rows (sequence-wise) or those of one time
step (frame-wise). Statistics are held as (K, C) for K groups, always in float32 or wider, and
always two-pass: the mean first, then the centred squares.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from normrnn.ops.steps import Run, Steps

Fixed = tuple[Tensor, Tensor]
"""Mean and variance that do not come from the batch, each (1, C) or (K, C)."""
LONE = (
    "a time step with a single row is normalised with running statistics, and there are none: "
    "construct the layer with track_running_stats=True, or drop the lone rows"
)


CONSTANT = 1e-12
"""The variance of a step whose rows are all equal, relative to the square of its mean, is below.
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
    single: bool = False
    """Whether there is one whatever the batch, so that no rank need ask for the others' number."""

    @staticmethod
    def sequence(steps: Steps) -> "Groups":
        return Groups((Run(0, 1, 0, steps.rows),), single=True)

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
        """``f`` of every row of (N, C) and the values (K, C) of its group, (N, C)."""
        parts = [
            f(self.view(run, rows), values[run.first : run.first + run.steps, None]).flatten(0, 1)
            for run in self.runs
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type statistics are computed in: float32 or wider."""
    return dtype if dtype == torch.float64 else torch.float32


class Pool:
    """The ranks that pool statistics: those of a process group, or of the default one.

    A copy has the same; a pickle the default one, since a group belongs to its process.
    """

    def __init__(self, process_group: Any = None):
        if process_group is not None and process_group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "this process is not in the process_group that was given: give each process a"
                " group that it belongs to, or None"
            )
        self.process_group = process_group

    def __deepcopy__(self, memo: Any) -> "Pool":
        return self

    def __reduce__(self) -> Any:
        return Pool, ()


EVERYBODY = Pool()


def measure(
    rows: Tensor, groups: Groups, sync: bool = False, ranks: Pool = EVERYBODY
) -> tuple[Statistics, Tensor]:
    """Statistics of every group (with ``sync`` over all ranks), and the centred rows (N, C).

    Differentiable, any number of times. Ranks may hold different T: K is then the largest, and a
    rank without rows at a step counts for nothing.
    """
    rows = rows.to(wide(rows.dtype))
    shared = synchronised(sync, ranks)
    if shared:
        _refuse_join()
    # Filled on the device: a tensor of a list is copied there, at every step of a loop.
    count = torch.cat([rows.new_full((run.steps,), run.width) for run in groups.runs])
    sums = groups.sums(rows)
    if shared:
        most = 1 if groups.single else _most(len(groups), rows.device, ranks)
        both = _AllReduce.apply(_padded(torch.cat([sums, count[:, None]], 1), most), ranks)
        sums, count = both[:, :-1], both[:, -1].detach()  # type: ignore[index]
    mean = sums / count[:, None]
    centred = groups.each(rows, mean, torch.sub)
    squares = groups.sums(centred.square())
    if shared:
        squares = _AllReduce.apply(_padded(squares, len(count)), ranks)  # type: ignore[assignment]
    return Statistics(mean, squares / count[:, None], count), centred


def constant_groups(found: Statistics, directions: int = 1) -> Tensor:
    """Which groups have several rows that are all equal, up to rounding: (K, directions), each
    judged by its own channels together."""
    var, square = (
        v.unflatten(1, (directions, -1)).sum(2) for v in (found.var, found.mean.square())
    )
    return (found.count > 1)[:, None] & (var <= CONSTANT * square)


def with_fixed(
    found: Statistics,
    centred: Tensor,
    rows: Tensor,
    groups: Groups,
    fixed: Fixed | None,
    directions: int = 0,
    shared: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Mean, variance and centred rows, by ``fixed`` where a group has no variance of its own: a
    single row or, with ``directions``, rows that are all equal, as at a start token.

    ``shared`` counts are other ranks' too, which the device alone knows. The last value says which
    (K, C) are the batch's own; None: all. Without ``fixed`` only a single row is an error.
    """
    lone = found.count <= 1
    if fixed is None:
        if bool(lone.any()) if shared else groups.has_single_rows:
            raise ValueError(LONE)
        return found.mean, found.var, centred, None
    if not (shared or directions or groups.has_single_rows):
        return found.mean, found.var, centred, None
    own = ~lone[:, None].expand_as(found.mean)
    if directions:
        width = found.mean.shape[1] // directions
        own = own & ~constant_groups(found, directions).repeat_interleave(width, 1)
    mean, var = (
        torch.where(own, value, _spread(given.to(value.dtype), value))
        for given, value in zip(fixed, found[:2], strict=True)
    )
    return mean, var, groups.each(rows, mean, torch.sub), own


def _spread(fixed: Tensor, like: Tensor) -> Tensor:
    """Given statistics for as many groups as any rank has: the last row stands for the rest."""
    missing = len(like) - len(fixed)
    if len(fixed) > 1 and missing > 0:
        fixed = torch.cat([fixed, fixed[-1:].expand(missing, -1)])
    return fixed


def pool(statistics: Statistics) -> Statistics:
    """All groups as one: the centred merge of K statistics, weighted by their counts, which may
    differ from channel to channel, (K, C)."""
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
    """The first ``inputs`` channels of groups whose rows are all equal there count for nothing.

    They have the normalised input, W_x x. The counts are (K, C) then.
    """
    if not inputs:
        return statistics
    mean, var, count = statistics
    constant = constant_groups(Statistics(mean[:, :inputs], var[:, :inputs], count))
    counts = count[:, None].expand_as(mean)
    channel = torch.arange(mean.shape[1], device=mean.device)
    return Statistics(mean, var, counts.masked_fill(constant & (channel < inputs), 0))


def unbiased(statistics: Statistics) -> Tensor:
    """What running buffers hold (torch's convention); normalising uses the biased variance."""
    return statistics.var * _by_channel(statistics.count / (statistics.count - 1).clamp(min=1))


def _by_channel(count: Tensor) -> Tensor:
    return count if count.dim() == 2 else count[:, None]


def synchronised(sync: bool, ranks: Pool = EVERYBODY) -> bool:
    """Whether there is more than one rank to share statistics with."""
    if not (sync and dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_world_size(ranks.process_group) > 1


def _refuse_join() -> None:
    """A rank that has joined answers for gradients alone: the others would wait for its rows, or
    take its answer for them."""
    ddp = DistributedDataParallel._active_ddp_module
    join = getattr(ddp, "_join_config", None)
    if join is not None and join.enable and not join.throw_on_early_termination:
        raise RuntimeError(
            "statistics pooled over ranks (sync=True) do not go with uneven inputs under Join,"
            " since a rank that has run out takes no part in them: pass"
            " throw_on_early_termination=True, give every rank as many batches, or use sync=False"
        )


class _AllReduce(torch.autograd.Function):
    """The sum over ranks. Each rank's loss depends on every rank's part, so gradients are summed
    over ranks too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Pool) -> Tensor:
        ctx.ranks = ranks
        return _reduced(tensor.clone(), dist.ReduceOp.SUM, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllReduce.apply(grads[0], ctx.ranks), None  # type: ignore[return-value]


def _reduced(tensor: Tensor, op: Any, ranks: Pool) -> Tensor:
    dist.all_reduce(tensor, op=op, group=ranks.process_group)
    return tensor


def _most(groups: int, device: torch.device, ranks: Pool) -> int:
    return int(_reduced(torch.tensor(groups, device=device), dist.ReduceOp.MAX, ranks))


def summed(values: Tensor, groups: int, ranks: Pool) -> Tensor:
    """(K, …) of each rank -> (groups, …), the sum of all; not differentiable."""
    return _reduced(_padded(values, groups).contiguous(), dist.ReduceOp.SUM, ranks)


def _padded(values: Tensor, groups: int) -> Tensor:
    """(K, …) -> (groups, …), with zeros."""
    return F.pad(values, (0, 0, 0, groups - len(values)))
