"""Batch normalisation of rows (paper, sections 2 and 4.1)."""

from typing import Any

import torch
from torch import Tensor

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
    if batch and pool is not None:
        out, *found = _Pooled.apply(values, weight, bias, groups, eps, given, pool, directions)  # type: ignore[misc]
        return out.to(rows.dtype), Statistics(*found)
    if batch:
        found, centred = measure(values, groups)
        _, var, centred, _ = with_given(found, centred, values, groups, given, directions)
        measured = Statistics(*(value.detach() for value in found))
    else:
        if given is None:
            raise ValueError("batch=False needs given=, the mean and variance to normalise with")
        mean, var = (value.to(values.dtype).expand(len(groups), -1) for value in given)
        centred = groups.each(values, mean, torch.sub)
    return _scaled(centred, var, weight, bias, groups, eps).to(rows.dtype), measured


def _scaled(
    centred: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: Groups,
    eps: float,
) -> Tensor:
    scale = (var + eps).rsqrt()
    out = groups.each(centred, scale if weight is None else scale * weight, torch.mul)
    return out if bias is None else out + bias


class _Pooled(torch.autograd.Function):
    """Normalisation with statistics pooled over ranks.

    Autograd would take some ten passes over the rows, and as many all-reduces in the backward pass
    as in the forward pass; this backward pass has one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: Groups,
        eps: float,
        given: Given | None,
        pool: Pool,
        directions: int,
    ) -> tuple[Tensor, ...]:
        found, centred = measure(rows, groups, pool)
        mean, var, centred, own = with_given(found, centred, rows, groups, given, directions, True)
        out = _scaled(centred, var, weight, bias, groups, eps)
        ctx.save_for_backward(rows, weight, bias, mean, (var + eps).rsqrt(), found.count, own)
        ctx.static = groups, eps, given, pool, directions
        statistics = found.mean.clone(), found.var.clone(), found.count
        ctx.mark_non_differentiable(*statistics)
        return out, *statistics

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return *_differentiable_backward(ctx, grads[0]), *[None] * 5
        rows, weight, bias, mean, scale, count, own = ctx.saved_tensors
        groups, _, _, pool, _ = ctx.static
        grad = grads[0]
        normed = groups.each(groups.each(rows, mean, torch.sub), scale, torch.mul)
        both = torch.cat([groups.sums(grad), groups.sums(grad * normed)], 1)
        vectors = both.sum(0).chunk(2)
        if weight is not None:
            both = both * torch.cat([weight, weight])
        shared = pool.sum_detached(both, len(count)) / count[:, None]
        first, second = shared.chunk(2, 1)
        if own is not None:  # given statistics do not depend on the rows
            first, second = (torch.where(own, value, 0.0) for value in (first, second))
        d_rows = groups.each(grad, scale if weight is None else scale * weight, torch.mul)
        d_rows -= groups.each(normed, second * scale, torch.mul)
        d_rows = groups.each(d_rows, first * scale, torch.sub)
        d_weight = None if weight is None else vectors[1]
        return d_rows, d_weight, None if bias is None else vectors[0], *[None] * 5


def _differentiable_backward(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """Compute the same gradients in operations that autograd can differentiate again."""
    inputs = rows, weight, bias = ctx.saved_tensors[:3]
    groups, eps, given, pool, directions = ctx.static
    found, centred = measure(rows, groups, pool)
    _, var, centred, _ = with_given(found, centred, rows, groups, given, directions, True)
    out = _scaled(centred, var, weight, bias, groups, eps)
    wanted = [t is not None and t.requires_grad for t in inputs]
    sources = [t for t, want in zip(inputs, wanted, strict=True) if want]
    grads = iter(torch.autograd.grad(out, sources, grad, create_graph=True))
    return [next(grads) if want else None for want in wanted]
