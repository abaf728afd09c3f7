"""A layer's stack, run on rows along one of the paths."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normrnn.ops.direction import (
    State,
    Weights,
    add_bias,
    flat,
    project,
    recur,
    recur_fused,
    row_major,
)
from normrnn.ops.fold import batch_fold, fused
from normrnn.ops.statistics import Statistics
from normrnn.ops.steps import Steps

if TYPE_CHECKING:
    from normrnn.nn.base import Normalised
    from normrnn.nn.normaliser import Normaliser


def run(
    layer: Normalised,
    rows: Tensor,
    steps: Steps,
    state: State,
    batch_sizes: Tensor | None,
    path: str,
    from_zero: bool = False,
) -> tuple[Tensor, State]:
    """Rows (N, I) and states (layers × directions, B, H) -> rows (N, directions × H), states.

    ``batch_sizes`` is None for a dense batch, which torch's kernels take another way.
    """
    if path == "folded" and not layer.normalisers()[0].uses_batch:
        return _test_time(layer, rows, steps, state, batch_sizes)
    directions = 2 if layer.bidirectional else 1
    finals: list[State] = []
    for depth in range(layer.num_layers):
        outputs = []
        for k in range(depth * directions, (depth + 1) * directions):
            one = _folded_direction if path == "folded" else _own_direction
            output, final = one(
                layer, k, rows, steps, tuple(s[k] for s in state), batch_sizes, from_zero
            )
            outputs.append(output)
            finals.append(final)
        rows = outputs[0] if directions == 1 else torch.cat(outputs, 1)
        if depth + 1 < layer.num_layers:
            rows = F.dropout(rows, layer.dropout, layer.training)
    return row_major(rows), tuple(torch.stack(parts) for parts in zip(*finals, strict=True))


def _own_direction(
    layer: Normalised,
    k: int,
    rows: Tensor,
    steps: Steps,
    state: State,
    batch_sizes: Tensor | None,  # noqa: ARG001 (the folded way needs it)
    from_zero: bool,
) -> tuple[Tensor, State]:
    weights, normaliser = layer.weights(k), layer.normaliser(k)
    reverse, dtype = layer.is_reverse(k), weights.w_hh.dtype
    pre = project(rows, weights.w_ih)
    autocast = torch.is_autocast_enabled(pre.device.type)
    with torch.autocast(pre.device.type, enabled=False) if autocast else nullcontext():
        state = tuple(s.to(dtype) for s in state)
        if normaliser is None:
            gates, weights = add_bias(layer.mode, pre.to(dtype), weights)
        elif layer.norm == "hidden":
            norm = normaliser.step_normaliser(steps)
            result = recur(
                layer.mode, pre.to(dtype), state, weights, steps, reverse=reverse, norm=norm
            )
            normaliser.observe(norm.statistics())
            return result
        else:
            gates = normaliser(pre, steps, dtype)
        return recur(
            layer.mode,
            gates,
            state,
            weights,
            steps,
            reverse=reverse,
            donate=normaliser is None or not _watched(normaliser),
            from_zero=from_zero,
        )


def _watched(module: nn.Module) -> bool:
    """Whether somebody may keep what it returned."""
    return bool(module._forward_hooks or nn.modules.module._global_forward_hooks)


def _folded_direction(
    layer: Normalised,
    k: int,
    rows: Tensor,
    steps: Steps,
    state: State,
    batch_sizes: Tensor | None,
    from_zero: bool,  # noqa: ARG001 (our own way needs it)
) -> tuple[Tensor, State]:
    """Training, sequence-wise: torch's kernel with weights folded by the batch itself."""
    weights: Weights = layer.weights(k)
    n: Normaliser | None = layer.normaliser(k)
    assert n is not None
    w_ih, b_ih, mean, var = batch_fold(rows, weights.w_ih, n.weight, n.bias, n.eps)
    count = mean.new_full((1,), steps.rows)
    n.observe(Statistics(mean.unsqueeze(1), var.unsqueeze(1), count))
    plain = flat(layer.mode, weights, w_ih, b_ih)
    how = {"batch_sizes": batch_sizes, "reverse": layer.is_reverse(k)}
    return recur_fused(layer.mode, rows, state, plain, steps, **how)


def _test_time(
    layer: Normalised, rows: Tensor, steps: Steps, state: State, batch_sizes: Tensor | None
) -> tuple[Tensor, State]:
    """With statistics shared over time the whole stack is one call of torch's kernel."""
    weights = [tensor for plain in layer.folded_weights() for tensor in plain]
    x = rows if batch_sizes is not None else rows.view(len(steps), steps.batch, -1)
    output, *final = fused(
        layer.mode,
        x,
        state,
        weights,
        batch_sizes=batch_sizes,
        num_layers=layer.num_layers,
        dropout=layer.dropout,
        training=layer.training,  # with frozen normalisers it may be: dropout stays
        bidirectional=layer.bidirectional,
    )
    return output.reshape(steps.rows, -1), tuple(final)
