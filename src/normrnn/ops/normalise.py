"""Batch normalisation of rows (paper, sections 2 and 4.1)."""

import torch
from torch import Tensor

from normrnn.ops.call import Norm
from normrnn.ops.layout import Steps
from normrnn.ops.statistics import Given, Groups, Statistics, measure, wide, with_given
from normrnn.ops.sync import Pool


def normalise(
    rows: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: Groups,
    *,
    eps: float = 1e-5,
    given: Given | None = None,
    batch: bool = True,
    pool: Pool | None = None,
    directions: int = 0,
) -> tuple[Tensor, Statistics | None]:
    """γ (x − mean) / √(var + ε) + β over each group of rows.

    Args:
        rows: (N, C), usually W_x x.
        weight, bias: γ and β, (C,) each, or None.
        groups: which rows share statistics.
        given: mean and variance, (1, C) or (K, C): for ``batch=False``, and for groups of one row,
            which have no variance.
        batch: use the batch's own statistics.
        pool: ranks to pool the statistics over, by row count.
        directions: how many directions' W_x x these are, side by side: groups whose rows are all
            equal are then normalised with ``given`` too. 0: no such test.

    Returns:
        The normalised rows, and the statistics of the batch, detached (None with
        ``batch=False``). Everything is computed in float32 or wider.

    >>> import torch
    >>> from normrnn.ops.layout import Steps
    >>> x = torch.tensor([[1.0], [2.0], [3.0], [4.0], [6.0]])
    >>> out, statistics = normalise(x, None, None, Groups.frame(Steps((3, 2))), eps=0.0)
    >>> out.flatten()
    tensor([-1.2247,  0.0000,  1.2247, -1.0000,  1.0000])
    >>> statistics.mean.flatten(), statistics.count
    (tensor([2., 5.]), tensor([3., 2.]))
    """
    values, measured = rows.to(wide(rows.dtype)), None
    if batch:
        measured_batch, centred = measure(values, groups, pool)
        var, centred = with_given(
            measured_batch, centred, values, groups, given, directions, pool is not None
        )
        measured = Statistics(*(value.detach() for value in measured_batch))
    else:
        if given is None:
            raise ValueError("batch=False needs given=, the mean and variance to normalise with")
        mean, var = (value.to(values.dtype).expand(len(groups), -1) for value in given)
        centred = groups.each(values, mean, torch.sub)
    scale = (var + eps).rsqrt()
    out = groups.each(centred, scale if weight is None else scale * weight, torch.mul)
    return (out if bias is None else out + bias).to(rows.dtype), measured


def normalise_input(
    norm: Norm, steps: Steps, pre: Tensor, pool: Pool | None = None, directions: int = 1
) -> tuple[Tensor, Statistics | None]:
    """Normalise gate inputs (N, D·C); also return the statistics of the batch."""
    per_step, given = norm.per_step, None
    if norm.mean is not None and norm.var is not None:
        has_slots = len(norm.mean) > 1
        if not norm.batch:  # shared over time they need no groups
            per_step = has_slots
        given = norm.mean, norm.var
        if per_step and has_slots:
            # A padded batch may have statistics of more steps than its longest sequence.
            given = norm.mean[: steps.time], norm.var[: steps.time]
    return normalise(
        pre,
        norm.weight,
        norm.bias,
        Groups.frame(steps) if per_step else Groups.sequence(steps),
        eps=norm.eps,
        given=given,
        batch=norm.batch,
        pool=pool,
        directions=directions if norm.per_step else 0,
    )
