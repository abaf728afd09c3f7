"""Softmax cross entropy over many classes, all gradients at once."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ROWS = 2048
"""Rows of logits in memory at once in training."""
LOGITS = 1 << 25
"""Logits in memory at once in evaluation, whose windows are longer."""


class Classified(NamedTuple):
    nats: Tensor
    """Summed over the rows, ()."""
    errors: Tensor
    """Rows in which another class was the most probable, ()."""
    d_rows: Tensor
    d_weight: Tensor
    d_bias: Tensor


def _classify(rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Classified:
    """Score a chunk and compute its gradients; logits and probabilities share one buffer."""
    index = targets[:, None]
    z = torch.addmm(bias, rows, weight.T)
    errors = (z.argmax(1) != targets).sum()
    top = z.amax(1, keepdim=True)
    true = z.gather(1, index)
    total = z.sub_(top).exp_().sum(1, keepdim=True)
    nats = (total.log() + top - true).sum()
    z.div_(total)
    z.scatter_add_(1, index, z.new_full((1, 1), -1.0).expand_as(index))
    return Classified(nats, errors, z @ weight, z.T @ rows, z.sum(0))


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss is a scalar, so its gradients are known up to a factor in the forward pass, and no
    logits are kept; double backward computes them again.

    `F.linear_cross_entropy` of torch 2.13 does the same in chunks, and is slower
    on a CPU than the two functions one after the other (benchmarks/NOTES.md).
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        chunks = []
        for some, right in zip(rows.split(CHUNK_ROWS), targets.split(CHUNK_ROWS), strict=True):
            chunks.append(_classify(some, weight, bias, right))
        nats, errors, d_rows, d_weight, d_bias = zip(*chunks, strict=True)
        d_rows = torch.cat(d_rows) if len(chunks) > 1 else d_rows[0]
        nats, errors, d_weight, d_bias = map(_sum, (nats, errors, d_weight, d_bias))
        arguments = rows, weight, bias, targets
        ctx.save_for_backward(d_rows, d_weight, d_bias, *arguments)
        ctx.mark_non_differentiable(errors)
        return nats, errors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *gradients, rows, weight, bias, targets = ctx.saved_tensors
        scale = grads[0]
        if torch.is_grad_enabled():  # double backward
            logits = F.linear(rows, weight, bias)
            d = scale * (logits.softmax(1) - F.one_hot(targets, len(weight)))
            return d @ weight, d.T @ rows, d.sum(0), None
        return *(d * scale for d in gradients), None


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum, in the memory of the first."""
    first, *others = parts
    for other in others:
        first += other
    return first


def nats_and_errors(
    rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, *, count_errors: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the summed nats of `targets` (N,) under softmax(rows Wᵀ + b), and how many are wrong.
    rows (N, H), weight (C, H).

    >>> rows, weight, bias = torch.ones(2, 3), torch.zeros(4, 3), torch.tensor([0., 0., 1., 0.])
    >>> nats, errors = nats_and_errors(rows, weight, bias, torch.tensor([2, 3]))
    >>> round(nats.item(), 4), errors.item()  # 2 log(3 + e) - 1
    (2.4873, 1)
    """
    kind = rows.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):  # sums need full precision
            rows = rows.to(weight.dtype)
            return nats_and_errors(rows, weight, bias, targets, count_errors=count_errors)
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(rows, weight, bias, targets)
    nats, errors = rows.new_zeros(()), targets.new_zeros(())
    for logits, right in _logits(rows, weight, bias, targets):
        nats += F.cross_entropy(logits, right, reduction="sum")
        if count_errors:
            errors += (logits.argmax(1) != right).sum()
    return nats, errors


def _logits(
    rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and targets in chunks of limited size."""
    most = max(1, min(CHUNK_ROWS, LOGITS // len(weight)))
    for some, right in zip(rows.split(most), targets.split(most), strict=True):
        yield F.linear(some, weight, bias), right
