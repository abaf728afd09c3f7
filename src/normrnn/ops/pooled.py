"""Batch normalisation with statistics pooled over ranks, its derivative written down.

Left to autograd the same takes some ten passes over the rows, and as many meetings of the ranks on
the way back as on the way there; this one has a single meeting on the way back.
"""

from typing import Any

import torch
from torch import Tensor

from normrnn.ops.statistics import Fixed, Groups, Pool, Statistics, measure, summed, with_fixed


def pooled(
    rows: Tensor,
    vectors: tuple[Tensor | None, Tensor | None],
    groups: Groups,
    eps: float,
    fixed: Fixed | None,
    ranks: Pool,
    directions: int,
) -> tuple[Tensor, Statistics]:
    """What :func:`normrnn.ops.normalise.normalise` gives with ``sync``; rows in float32 or wider,
    ``fixed`` for groups of one row, or of equal rows, over all ranks."""
    out, *found = _Pooled.apply(rows, *vectors, groups, eps, fixed, ranks, directions)
    return out, Statistics(*found)


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: Groups,
        eps: float,
        fixed: Fixed | None,
        ranks: Pool,
        directions: int,
    ) -> tuple[Tensor, ...]:
        found, centred = measure(rows, groups, True, ranks)
        given = rows, groups, fixed, directions, True
        mean, var, centred, own = with_fixed(found, centred, *given)
        scale = (var + eps).rsqrt()
        out = groups.each(centred, scale if weight is None else scale * weight, torch.mul)
        if bias is not None:
            out += bias
        ctx.save_for_backward(rows, weight, bias, mean, scale, found.count, own)
        ctx.how = groups, eps, fixed, ranks, directions
        statistics = found.mean.clone(), found.var.clone(), found.count
        ctx.mark_non_differentiable(*statistics)
        return out, *statistics

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return *_again(ctx, grads[0]), *[None] * 5
        rows, weight, bias, mean, scale, count, own = ctx.saved_tensors
        groups, _, _, ranks, _ = ctx.how
        grad = grads[0]
        normed = groups.each(groups.each(rows, mean, torch.sub), scale, torch.mul)
        both = torch.cat([groups.sums(grad), groups.sums(grad * normed)], 1)
        vectors = both.sum(0).chunk(2)
        if weight is not None:
            both = both * torch.cat([weight, weight])
        shared = summed(both, len(count), ranks) / count[:, None]
        first, second = shared.chunk(2, 1)
        if own is not None:  # other groups were normalised with what does not depend on them
            first, second = (torch.where(own, value, 0.0) for value in (first, second))
        into = groups.each(grad, scale if weight is None else scale * weight, torch.mul)
        into -= groups.each(normed, second * scale, torch.mul)
        into = groups.each(into, first * scale, torch.sub)
        return (
            into,
            None if weight is None else vectors[1],
            None if bias is None else vectors[0],
            *[None] * 5,
        )


def _again(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """For whoever differentiates twice: the same in operations that autograd knows."""
    rows, weight, bias, *_ = ctx.saved_tensors
    groups, eps, fixed, ranks, directions = ctx.how
    found, centred = measure(rows, groups, True, ranks)
    _, var, centred, _ = with_fixed(found, centred, rows, groups, fixed, directions, True)
    scale = (var + eps).rsqrt()
    out = groups.each(centred, scale if weight is None else scale * weight, torch.mul)
    out = out if bias is None else out + bias
    inputs = [t for t in (rows, weight, bias) if t is not None and t.requires_grad]
    wanted = iter(torch.autograd.grad(out, inputs, grad, create_graph=True))
    given = rows, weight, bias
    return [next(wanted) if t is not None and t.requires_grad else None for t in given]
