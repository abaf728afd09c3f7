"""Batch normalisation of rows (paper, sections 2 and 4.1), in operations that autograd knows."""

import torch
from torch import Tensor

from normrnn.ops.statistics import (
    EVERYBODY,
    Groups,
    Pool,
    Statistics,
    measure,
    synchronised,
    wide,
)

Fixed = tuple[Tensor, Tensor]
"""Mean and variance that do not come from the batch, each (1, C) or (K, C)."""
LONE = (
    "a time step with a single row is normalised with running statistics, and there are none: "
    "construct the layer with track_running_stats=True, or drop the lone rows"
)


def normalise(
    rows: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: Groups,
    *,
    eps: float = 1e-5,
    fixed: Fixed | None = None,
    batch: bool = True,
    sync: bool = False,
    ranks: Pool = EVERYBODY,
) -> tuple[Tensor, Statistics | None]:
    """γ (x − mean) / √(var + ε) + β over each group of rows.

    Args:
        rows: (N, C), usually W_x x.
        weight, bias: γ and β, (C,) each, or None.
        groups: which rows share statistics.
        fixed: mean and variance (1, C) or (K, C) for ``batch=False``, and for groups of one row,
            which have no variance.
        batch: use the batch's own statistics.
        sync: pool statistics over ``ranks``, by row count.

    Returns:
        The normalised rows, and the statistics of the batch, detached (None with
        ``batch=False``). Everything is computed in float32 or wider.

    >>> import torch
    >>> from normrnn.ops.steps import Steps
    >>> x = torch.tensor([[1.0], [2.0], [3.0], [4.0], [6.0]])
    >>> out, statistics = normalise(x, None, None, Groups.frame(Steps((3, 2))), eps=0.0)
    >>> out.flatten()
    tensor([-1.2247,  0.0000,  1.2247, -1.0000,  1.0000])
    >>> statistics.mean.flatten(), statistics.count
    (tensor([2., 5.]), tensor([3., 2.]))
    """
    dtype, measured = wide(rows.dtype), None
    if batch:
        found, centred = measure(rows, groups, sync, ranks)
        mean, var = found.mean, found.var
        lone = found.count <= 1
        if bool(lone.any()) if synchronised(sync, ranks) else min(groups.widths) == 1:
            if fixed is None:
                raise ValueError(LONE)
            mean = torch.where(lone[:, None], _spread(fixed[0].to(dtype), mean), mean)
            var = torch.where(lone[:, None], _spread(fixed[1].to(dtype), var), var)
            centred = groups.each(rows.to(dtype), mean, torch.sub)
        measured = Statistics(*(value.detach() for value in found))
    else:
        if fixed is None:
            raise ValueError("batch=False needs fixed=, the mean and variance to normalise with")
        mean, var = (value.to(dtype).expand(len(groups), -1) for value in fixed)
        centred = groups.each(rows.to(dtype), mean, torch.sub)
    scale = (var + eps).rsqrt()
    out = groups.each(centred, scale if weight is None else scale * weight, torch.mul)
    return (out if bias is None else out + bias).to(rows.dtype), measured


def _spread(fixed: Tensor, like: Tensor) -> Tensor:
    """Given statistics for as many groups as any rank has: the last row stands for the rest."""
    missing = len(like) - len(fixed)
    if len(fixed) > 1 and missing > 0:
        fixed = torch.cat([fixed, fixed[-1:].expand(missing, -1)])
    return fixed
