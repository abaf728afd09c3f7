"""Batch normalisation of rows (paper, sections 2 and 4.1), in operations that autograd knows."""

import torch
from torch import Tensor

from normrnn.ops.pooled import pooled
from normrnn.ops.statistics import (
    EVERYBODY,
    Fixed,
    Groups,
    Pool,
    Statistics,
    measure,
    synchronised,
    wide,
    with_fixed,
)

__all__ = ["Fixed", "normalise"]


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
    directions: int = 0,
) -> tuple[Tensor, Statistics | None]:
    """γ (x − mean) / √(var + ε) + β over each group of rows.

    Args:
        rows: (N, C), usually W_x x.
        weight, bias: γ and β, (C,) each, or None.
        groups: which rows share statistics.
        fixed: mean and variance (1, C) or (K, C) for ``batch=False``, and for groups of one row,
            which have no variance.
        directions: how many directions' W_x x these are, side by side: groups whose rows are all
            equal are then normalised with ``fixed`` too, if it is given. 0: not.
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
        if synchronised(sync, ranks):
            how = groups, eps, fixed, ranks, directions
            out, measured = pooled(rows.to(dtype), (weight, bias), *how)
            return out.to(rows.dtype), measured
        found, centred = measure(rows, groups)
        given = rows.to(dtype), groups, fixed, directions
        mean, var, centred, _ = with_fixed(found, centred, *given)
        measured = Statistics(*(value.detach() for value in found))
    else:
        if fixed is None:
            raise ValueError("batch=False needs fixed=, the mean and variance to normalise with")
        mean, var = (value.to(dtype).expand(len(groups), -1) for value in fixed)
        centred = groups.each(rows.to(dtype), mean, torch.sub)
    scale = (var + eps).rsqrt()
    out = groups.each(centred, scale if weight is None else scale * weight, torch.mul)
    return (out if bias is None else out + bias).to(rows.dtype), measured
