"""Softmax cross entropy over many classes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ROWS = 2048
"""Rows of logits held at once: a batch of long utterances needs no more memory than a short one."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Logits, probabilities and their gradient share one (chunk, C) buffer.

    The loss is a scalar, so its gradients are known up to a factor in the forward pass, and no
    logits are kept; they are made again if the gradients themselves are to be differentiated.
    `F.linear_cross_entropy` of torch 2.13 does the same in chunks, and is slower
    on a CPU than the two functions one after the other (benchmarks/NOTES.md).
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, count_errors: bool
    ) -> tuple[Tensor, Tensor]:
        nats, errors = rows.new_zeros(()), targets.new_zeros(())
        d_rows, d_weight, d_bias = [], torch.zeros_like(weight), torch.zeros_like(bias)
        for some, right in zip(rows.split(CHUNK_ROWS), targets.split(CHUNK_ROWS), strict=True):
            index = right[:, None]
            z = torch.addmm(bias, some, weight.T)
            if count_errors:
                errors += (z.argmax(1) != right).sum()
            top = z.amax(1, keepdim=True)
            true = z.gather(1, index)
            total = z.sub_(top).exp_().sum(1, keepdim=True)
            nats += (total.log() + top - true).sum()
            z.div_(total)
            z.scatter_add_(1, index, z.new_full((1, 1), -1.0).expand_as(index))
            d_rows.append(z @ weight)
            d_weight.addmm_(z.T, some)
            d_bias += z.sum(0)
        given = rows, weight, bias, targets
        ctx.save_for_backward(torch.cat(d_rows), d_weight, d_bias, *given)
        ctx.mark_non_differentiable(errors)
        return nats, errors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *known, rows, weight, bias, targets = ctx.saved_tensors
        scale = grads[0]
        if torch.is_grad_enabled():  # in operations that can be differentiated again
            logits = F.linear(rows, weight, bias)
            d = scale * (logits.softmax(1) - F.one_hot(targets, len(weight)))
            return d @ weight, d.T @ rows, d.sum(0), None, None
        return *(d * scale for d in known), None, None


def nats_and_errors(
    rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, *, count_errors: bool = True
) -> tuple[Tensor, Tensor]:
    """Nats of `targets` (N,) under softmax(rows Wᵀ + b), summed, and how often another class was
    the most probable. rows (N, H), weight (C, H).

    >>> rows, weight, bias = torch.ones(2, 3), torch.zeros(4, 3), torch.tensor([0., 0., 1., 0.])
    >>> nats, errors = nats_and_errors(rows, weight, bias, torch.tensor([2, 3]))
    >>> round(nats.item(), 4), errors.item()  # 2 log(3 + e) - 1
    (2.4873, 1)
    """
    if torch.is_autocast_enabled(rows.device.type):  # a sum over many classes and rows is not
        with torch.autocast(rows.device.type, enabled=False):  # for low precision
            rows = rows.to(weight.dtype)
            return nats_and_errors(rows, weight, bias, targets, count_errors=count_errors)
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(rows, weight, bias, targets, count_errors)
    nats, errors = rows.new_zeros(()), targets.new_zeros(())
    for some, right in zip(rows.split(CHUNK_ROWS), targets.split(CHUNK_ROWS), strict=True):
        logits = F.linear(some, weight, bias)
        nats += F.cross_entropy(logits, right, reduction="sum")
        if count_errors:
            errors += (logits.argmax(1) != right).sum()
    return nats, errors


def linear_cross_entropy(rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """The nats alone.

    >>> rows, weight, bias = torch.ones(2, 3), torch.zeros(4, 3), torch.zeros(4)
    >>> linear_cross_entropy(rows, weight, bias, torch.tensor([0, 3])).item() / 2  # log 4
    1.3862943649291992
    """
    return nats_and_errors(rows, weight, bias, targets, count_errors=False)[0]
