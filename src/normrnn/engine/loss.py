"""The loss of a batch and over batches, and softmax cross entropy with all gradients at once."""

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.config.measure import Measure
from normrnn.runs.records import Row

State = tuple[Tensor, ...]
"""What flows from batch to batch, each tensor (layers, B, H)."""
CHUNK_ROWS = 2048
"""Rows of logits in memory at once."""


@dataclass(frozen=True)
class Loss:
    """The loss of a batch, on the device: reading its value would wait for the device."""

    total: Tensor
    """Summed over the targets."""
    errors: Tensor | None = None
    """Number of wrong classes, where they are counted."""
    objective: Any = None
    """What is differentiated instead of `total`: the same loss in other units. The task divides it,
    or the total, by the number of targets or sequences."""
    state: State | None = None
    """The state after the batch, of a network that carries one."""
    count: int = 0
    """Targets, on all ranks; set by the task."""


@dataclass
class Sums:
    """Sums over batches; those of a train row are part of the checkpoint."""

    total: float = 0.0
    """Of the losses, over all targets."""
    count: int = 0
    """Targets."""
    errors: int | None = None
    """Wrong predictions, where they are counted."""
    figures: float = 0.0
    """Of the batches' figures, where the measure shows their mean."""
    batches: int = 0
    """Batches in `figures` and `grad_norm`."""
    grad_norm: float = 0.0

    def add(
        self,
        total: float,
        count: int,
        errors: int | None,
        measure: Measure,
        *,
        grad_norm: float = 0.0,
        is_full: bool = True,
    ) -> None:
        """Add a batch; a remainder does not count in means over batches."""
        if errors is not None:
            self.errors = errors + (self.errors or 0)
        self.total += total
        self.count += count
        if is_full:
            self.batches += 1
            self.grad_norm += grad_norm
            self.figures += measure.batch_mean[1](total / count) if measure.batch_mean else 0.0

    def row(self, measure: Measure) -> Row:
        """Return loss, error rate, count, mean over batches and further columns, as far as the
        measure has them."""
        loss = self.total / self.count
        row: Row = {"loss": loss}
        if measure.error_rate and self.errors is not None:
            row[measure.error_rate[0]] = self.errors / self.count
        row["count"] = self.count
        if measure.batch_mean:
            row[measure.batch_mean[0]] = self.figures / self.batches
        return {**row, **{key: convert(loss) for key, convert in measure.columns.items()}}


def _classify(rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Return nats and errors of a chunk, summed over its rows, and the gradients of rows, weight
    and bias; logits and probabilities share one buffer."""
    index = targets[:, None]
    z = torch.addmm(bias, rows, weight.T)
    errors = (z.argmax(1) != targets).sum()
    top = z.amax(1, keepdim=True)
    true = z.gather(1, index)
    total = z.sub_(top).exp_().sum(1, keepdim=True)
    nats = (total.log() + top - true).sum()
    z.div_(total)
    z.scatter_add_(1, index, z.new_full((1, 1), -1.0).expand_as(index))
    return nats, errors, z @ weight, z.T @ rows, z.sum(0)


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
        sums = (reduce(Tensor.add_, parts) for parts in (nats, errors, d_weight, d_bias))
        nats, errors, d_weight, d_bias = sums
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


def nats_and_errors(
    rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, *, count_errors: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the summed nats of `targets` (N,) under softmax(rows Wᵀ + b), and how many are wrong.
    rows (N, H), weight (C, H)."""
    kind = rows.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):  # sums need full precision
            rows = rows.to(weight.dtype)
            return nats_and_errors(rows, weight, bias, targets, count_errors=count_errors)
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(rows, weight, bias, targets)
    nats, errors = rows.new_zeros(()), targets.new_zeros(())
    for some, right in zip(rows.split(CHUNK_ROWS), targets.split(CHUNK_ROWS), strict=True):
        logits = F.linear(some, weight, bias)
        nats += F.cross_entropy(logits, right, reduction="sum")
        if count_errors:
            errors += (logits.argmax(1) != right).sum()
    return nats, errors
