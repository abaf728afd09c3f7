"""Means and variances over rows, pooled by count, alone or over the ranks of a process group.

A *group* is what shares one mean and variance: all N columns (sequence-wise) or one time step
(frame-wise). Statistics are held as (C, K) for K groups, always in float32 or wider, and always
two-pass: the mean first, then the centred squares.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from normrnn.ops.steps import Run, Steps


class Statistics(NamedTuple):
    """Mean and biased variance (C, K) over ``count`` (K,) rows of each group."""

    mean: Tensor
    var: Tensor
    count: Tensor  # type: ignore[assignment]


@dataclass(frozen=True)
class Groups:
    """Which columns share statistics: runs of K equally wide groups."""

    runs: tuple[Run, ...]

    @staticmethod
    def sequence(steps: Steps) -> "Groups":
        return Groups((Run(0, 1, 0, steps.rows),))

    @staticmethod
    def frame(steps: Steps) -> "Groups":
        return Groups(steps.runs)

    def __len__(self) -> int:
        return self.runs[-1].first + self.runs[-1].steps

    @property
    def widths(self) -> list[int]:
        return [run.width for run in self.runs for _ in range(run.steps)]

    @property
    def uniform(self) -> bool:
        return len(self.runs) == 1

    def view(self, run: Run, columns: Tensor) -> Tensor:
        """(C, N) -> (C, groups of the run, width)."""
        return columns[:, run.columns].unflatten(1, (run.steps, run.width))

    def of(self, run: Run, values: Tensor) -> Tensor:
        """(C, K) -> (C, groups of the run, 1)."""
        return values[:, run.first : run.first + run.steps].unsqueeze(2)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type statistics are computed in: float32 or wider."""
    return dtype if dtype == torch.float64 else torch.float32


def group_sums(x: Tensor, groups: Groups) -> Tensor:
    """(C, N) -> (C, K)."""
    parts = [groups.view(run, x).sum(2, dtype=wide(x.dtype)) for run in groups.runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def group_squares(x: Tensor, groups: Groups) -> Tensor:
    """Σ x² per group, (C, N) -> (C, K)."""
    norm = torch.linalg.vector_norm
    parts = [norm(groups.view(run, x), dim=2, dtype=wide(x.dtype)) for run in groups.runs]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).square_()


def pool(statistics: Statistics) -> Statistics:
    """All groups as one: the centred merge of K statistics, weighted by their counts."""
    if statistics.mean.shape[1] == 1:
        return statistics
    count = statistics.count.sum().view(1)
    share = statistics.count / count
    mean = (statistics.mean * share).sum(1, keepdim=True)
    var = ((statistics.var + (statistics.mean - mean).square()) * share).sum(1, keepdim=True)
    return Statistics(mean, var, count)


def unbiased(statistics: Statistics) -> Tensor:
    """What running buffers hold (torch's convention); normalising uses the biased variance."""
    return statistics.var * (statistics.count / (statistics.count - 1).clamp(min=1))


def synchronised(sync: bool) -> bool:
    """Whether there is more than one rank to share statistics with."""
    return sync and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def all_reduce(tensor: Tensor, op: Any = None) -> Tensor:
    """The sum (or ``op``) over ranks, in place."""
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM if op is None else op)
    return tensor


def most_groups(groups: int, device: torch.device) -> int:
    """The largest number of groups any rank has: ranks may hold different T."""
    return int(all_reduce(torch.tensor(groups, device=device), dist.ReduceOp.MAX))


def padded(values: Tensor, groups: int) -> Tensor:
    """(…, K) -> (…, groups), with zeros: a rank without rows at a step counts for nothing."""
    return torch.nn.functional.pad(values, (0, groups - values.shape[-1]))
