"""Batch normalisation of feature-major columns (paper, sections 2 and 4.1)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from normrnn.ops import native
from normrnn.ops.once import once_differentiable
from normrnn.ops.statistics import (
    Groups,
    Statistics,
    all_reduce,
    group_squares,
    group_sums,
    most_groups,
    padded,
    synchronised,
    wide,
)

Fixed = tuple[Tensor, Tensor]
"""Mean and variance that do not come from the batch, each (C, 1) or (C, K)."""


def _batch_statistics(pre: Tensor, groups: Groups, sync: bool) -> tuple[Statistics, Tensor]:
    """Statistics of every group (over all ranks with ``sync``), and the centred columns."""
    shared = synchronised(sync)
    count = torch.tensor(groups.widths, dtype=wide(pre.dtype), device=pre.device)
    sums = group_sums(pre, groups)
    if shared:
        most = most_groups(len(groups), pre.device)
        both = all_reduce(padded(torch.cat([sums, count.unsqueeze(0)]), most))
        sums, count = both[:-1], both[-1]
    mean = sums / count
    centred = _centre(pre, mean, groups)
    squares = group_squares(centred, groups)
    if shared:
        squares = all_reduce(padded(squares, count.shape[0]))
    return Statistics(mean, squares / count, count), centred


def _centre(pre: Tensor, mean: Tensor, groups: Groups) -> Tensor:
    if groups.uniform:
        run = groups.runs[0]
        return (groups.view(run, pre) - groups.of(run, mean)).flatten(1)
    centred = torch.empty_like(pre, dtype=mean.dtype)
    for run in groups.runs:
        torch.sub(groups.view(run, pre), groups.of(run, mean), out=groups.view(run, centred))
    return centred


def _scale_(columns: Tensor, scale: Tensor, shift: Tensor | None, groups: Groups) -> Tensor:
    for run in groups.runs:
        part = groups.view(run, columns).mul_(groups.of(run, scale))
        if shift is not None:
            part.add_(shift.view(-1, 1, 1))
    return columns


def _lone(statistics: Statistics, fixed: Fixed | None, lenient: bool) -> Tensor | None:
    """Which groups hold one row, and so have no variance; None if none do."""
    lone = statistics.count <= 1
    if not bool(lone.any()):
        return None
    if bool(lone.all()) and not lenient:
        raise ValueError(
            "normalising with batch statistics needs more than one row (an unpadded frame) "
            f"in at least one group, got counts {[int(n) for n in statistics.count[:8]]}; "
            "use a larger batch, or eval() mode for running statistics"
        )
    if fixed is None:
        raise ValueError(
            "a time step with a single row is normalised with running statistics, and there are "
            "none: construct the layer with track_running_stats=True, or drop the lone rows"
        )
    return lone


class _Normalised(NamedTuple):
    out: Tensor
    mean: Tensor
    """What was subtracted, and the factor 1/√(var + ε), each (C, K)."""
    invstd: Tensor
    statistics: Statistics
    """The batch's; those that were given without a batch's."""
    fixed: Tensor | None
    """Which groups were not normalised by their own statistics; None if all were."""


def _by_kernel(
    pre: Tensor, weight: Tensor | None, bias: Tensor | None, groups: Groups, eps: float
) -> _Normalised:
    """By the batch's statistics, in one go."""
    out, mean, var, invstd = native.normalise(pre, weight, bias, len(groups), eps)
    count = torch.full((len(groups),), float(groups.runs[0].width))
    return _Normalised(out, mean, invstd, Statistics(mean, var, count), None)


def _by_batch(
    pre: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: Groups,
    eps: float,
    fixed: Fixed | None,
    lenient: bool,
    sync: bool,
) -> _Normalised:
    statistics, centred = _batch_statistics(pre, groups, sync)
    mean, var, _ = statistics
    lone = _lone(statistics, fixed, lenient)
    if lone is not None:
        assert fixed is not None
        mean = torch.where(lone, _spread(fixed[0], mean), mean)
        var = torch.where(lone, _spread(fixed[1], var), var)
        centred = _centre(pre, mean, groups)
    invstd = (var + eps).rsqrt_()
    out = _affine_(centred, invstd, weight, bias, groups)
    return _Normalised(out, mean, invstd, statistics, lone)


def _by_fixed(
    pre: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: Groups,
    eps: float,
    fixed: Fixed,
) -> _Normalised:
    mean, var = (value.to(wide(pre.dtype)).expand(-1, len(groups)) for value in fixed)
    invstd = (var + eps).rsqrt_()
    out = _affine_(_centre(pre, mean, groups), invstd, weight, bias, groups)
    everywhere = torch.ones(len(groups), dtype=torch.bool, device=pre.device)
    return _Normalised(out, mean, invstd, Statistics(mean, var, mean.new_empty(0)), everywhere)


def _affine_(
    centred: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None, groups: Groups
) -> Tensor:
    scale = invstd if weight is None else invstd * weight.unsqueeze(1)
    return _scale_(centred, scale, bias, groups)


def _kernel_serves(pre: Tensor, weight: Tensor | None, groups: Groups) -> bool:
    """Equal groups of more than one row, in the one type the kernel is written for."""
    right_type = weight is None or weight.dtype == pre.dtype
    equal = groups.uniform and groups.runs[0].width > 1
    return equal and right_type and pre.is_contiguous() and native.usable(pre)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        pre: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        fixed: Fixed | None,
        groups: Groups,
        eps: float,
        batch: bool,
        lenient: bool,
        sync: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        shared = batch and synchronised(sync)
        if batch and not shared and _kernel_serves(pre, weight, groups):
            result = _by_kernel(pre, weight, bias, groups, eps)
        elif batch:
            result = _by_batch(pre, weight, bias, groups, eps, fixed, lenient, sync)
        else:
            assert fixed is not None
            result = _by_fixed(pre, weight, bias, groups, eps, fixed)
        statistics = result.statistics
        ctx.save_for_backward(pre, weight, result.mean, result.invstd, statistics.count)
        ctx.fixed_groups = result.fixed
        ctx.how = groups, eps, bias is not None, shared
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        return result.out.to(dtype), *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        d = grads[0]
        pre, weight, mean, invstd, count = ctx.saved_tensors
        groups, eps, biased, shared = ctx.how
        if d is None and not shared:
            return (None,) * 10
        d = torch.zeros_like(pre) if d is None else d  # the other ranks wait for ours
        simple = groups.uniform and not shared and ctx.fixed_groups is None
        if simple and pre.dtype == d.dtype == mean.dtype:
            d_pre, d_weight, d_bias = _fused_backward(d, pre, weight, mean, invstd, groups, eps)
        else:
            d_pre, d_weight, d_bias = _backward(
                d, pre, weight, mean, invstd, groups, count, ctx.fixed_groups, shared
            )
        return (
            d_pre,
            None if weight is None else d_weight.to(weight.dtype),
            d_bias.to(d.dtype) if biased else None,
            *(None,) * 7,
        )


def _spread(fixed: Tensor, like: Tensor) -> Tensor:
    """Given statistics for as many groups as any rank has: the last column stands for the rest."""
    missing = like.shape[1] - fixed.shape[1]
    if fixed.shape[1] > 1 and missing > 0:
        fixed = torch.cat([fixed, fixed[:, -1:].expand(-1, missing)], 1)
    return fixed.to(like.dtype)


def _fused_backward(
    d: Tensor,
    pre: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    groups: Groups,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in one kernel, ours or torch's: every (channel, group) is a channel of its own."""
    if _kernel_serves(pre, weight, groups) and d.is_contiguous():
        parts = native.normalise_backward(d, pre, weight, mean, invstd, len(groups))
        return parts[0], parts[1].sum(1), parts[2].sum(1)
    C, K, width = pre.shape[0], len(groups), groups.runs[0].width
    repeated = None if weight is None or K == 1 else weight.repeat_interleave(K)
    d_pre, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
        d.reshape(1, C * K, width),
        pre.reshape(1, C * K, width),
        weight if K == 1 else repeated,
        None,
        None,
        mean.reshape(-1),
        invstd.reshape(-1),
        True,
        eps,
        [True, True, True],
    )
    return d_pre.view_as(pre), d_weight.view(C, K).sum(1), d_bias.view(C, K).sum(1)


def _backward(
    d: Tensor,
    pre: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    groups: Groups,
    count: Tensor,
    fixed_groups: Tensor | None,
    shared: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    d = d.to(mean.dtype)
    hat = _scale_(_centre(pre, mean, groups), invstd, None, groups)
    sum_d, sum_dx = group_sums(d, groups), group_sums(d * hat, groups)
    d_weight, d_bias = sum_dx.sum(1), sum_d.sum(1)
    if shared:
        most = count.shape[0]
        sum_d, sum_dx = all_reduce(padded(torch.stack([sum_d, sum_dx]), most))
    if fixed_groups is not None and bool(fixed_groups.all()):
        d_pre = d.clone()
    else:
        keep = 1.0 if fixed_groups is None else (~fixed_groups).to(d.dtype)
        d_mean, d_var = sum_d / count * keep, sum_dx / count * keep
        d_pre = _scale_(hat, d_var, None, groups)
        for run in groups.runs:
            groups.view(run, d_pre).add_(groups.of(run, d_mean))
        d_pre = torch.sub(d, d_pre, out=d_pre)
    d_pre = _affine_(d_pre, invstd, weight, None, groups)
    return d_pre.to(pre.dtype), d_weight, d_bias


def column_statistics(pre: Tensor, groups: Groups, sync: bool = False) -> Statistics:
    """Mean, biased variance (C, K) and count (K,) of every group of columns (C, N)."""
    return _batch_statistics(pre, groups, sync)[0]


def normalise(
    pre: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: Groups,
    *,
    eps: float = 1e-5,
    fixed: Fixed | None = None,
    batch: bool = True,
    lenient: bool = False,
    sync: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Statistics]:
    """γ (x − mean) / √(var + ε) + β over each group of columns.

    Args:
        pre: (C, N) columns, usually W_x x.
        weight, bias: γ and β, (C,) each, or None.
        groups: which columns share statistics.
        fixed: mean and variance (C, 1) or (C, K) for ``batch=False``, and for groups of one row.
        batch: use the batch's own statistics.
        lenient: allow a batch in which every group has one row (``fixed`` serves).
        sync: pool statistics over the ranks of the default process group, by row count.
        dtype: of the result; the statistics are float32 or wider whatever it is.

    Returns:
        The normalised columns, and the statistics of the batch (mean, biased variance, count).
        With ``batch=False`` the statistics are the fixed ones and the count is empty.

    >>> import torch
    >>> from normrnn.ops.steps import Steps
    >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 6.0]])
    >>> out, statistics = normalise(x, None, None, Groups.frame(Steps((3, 2))), eps=0.0)
    >>> out
    tensor([[-1.2247,  0.0000,  1.2247, -1.0000,  1.0000]])
    >>> statistics.mean, statistics.count
    (tensor([[2., 5.]]), tensor([3., 2.]))
    """
    out, *statistics = _Normalise.apply(  # type: ignore
        pre, weight, bias, fixed, groups, eps, batch, lenient, sync, dtype or pre.dtype
    )
    return out, Statistics(*statistics)
