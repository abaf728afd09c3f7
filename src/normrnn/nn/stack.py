"""Run the layers and directions of a module on rows."""

from collections.abc import Callable, Sequence
from operator import itemgetter, methodcaller
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.nn.normaliser import GateNorm, Resolved
from normrnn.ops.call import CELLS, Norm, Result, State, Weights, describe_call
from normrnn.ops.layout import Steps
from normrnn.ops.recurrence import recur
from normrnn.ops.regularise import draw_mask, drop_weights, locked_dropout
from normrnn.ops.statistics import Statistics

_REVERSE = {1: (False,), 2: (False, True)}


class Batch(NamedTuple):
    """The input of a module, or of one of its layers, as rows."""

    rows: Tensor
    """(N, I)."""
    steps: Steps
    state: State | None = None
    """(layers × directions, B, H) each; None: zeros."""
    resets: Tensor | None = None
    """Rows (N,)."""
    reset_to: State | None = None
    """The state that resets start from, as ``state``."""

    def states(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with changed states."""
        state = self.state and tuple([change(s) for s in self.state])
        reset_to = self.reset_to and tuple([change(s) for s in self.reset_to])
        return self._replace(state=state, reset_to=reset_to)


class Parts(NamedTuple):
    """The parameters of a module, per layer and direction in torch's order."""

    weights: list[Weights]
    normalisers: Sequence[GateNorm]
    """Empty without a norm."""
    resolved: list[Resolved]

    def of_layer(self, first: int, directions: int) -> "Parts":
        """Return those of the layer whose first direction has this number."""
        part = slice(first, first + directions)
        return Parts(self.weights[part], self.normalisers[part], self.resolved[part])


def run(module: Any, batch: Batch, parts: Parts) -> tuple[Tensor, State]:
    """Run all layers by the recurrence; rows (N, directions × H) and the final states."""
    D, count, rows, finals = module.directions, len(parts.weights), batch.rows, []
    for first in range(0, count, D):
        last = first + D
        part, layer_parts = batch, parts
        if count > D:
            part = batch._replace(rows=rows).states(itemgetter(slice(first, last)))
            layer_parts = parts.of_layer(first, D)
        rows, final = _run_layer(module, part, layer_parts)
        finals.append(final)
        if last < count:
            rows = _dropout(module, rows, batch.steps)
    if len(finals) == 1:
        return rows, finals[0]
    return rows, tuple(map(torch.cat, zip(*finals, strict=True)))


def _dropout(module: Any, rows: Tensor, steps: Steps) -> Tensor:
    """Apply dropout between layers; masks are drawn in the order in which torch draws them."""
    if module.dropout_kind == "locked" and module.training and module.dropout:
        return locked_dropout(rows, steps, module.dropout)
    return F.dropout(rows, module.dropout, module.training)


def _run_layer(module: Any, batch: Batch, parts: Parts) -> tuple[Tensor, State]:
    """Run one layer; the projections of both directions are one product."""
    weights, normalisers, resolved = parts
    dtype = weights[0].w_hh.dtype
    if batch.rows.dtype != dtype:  # under autocast
        batch = batch._replace(rows=batch.rows.to(dtype)).states(methodcaller("to", dtype))
    rows, steps = batch.rows, batch.steps
    if module.training and module.weight_drop:
        weights = [w._replace(w_hh=drop_weights(w.w_hh, module.weight_drop)) for w in weights]
    norms: list[Norm | None] = []
    shared: dict[Any, Any] = {}
    for d, weight in enumerate(weights):
        if normalisers and not resolved[d].changes_weights:
            needs_call = resolved[d].needs_call
            norms.append(None if needs_call else normalisers[d].norm(resolved[d], steps))
            continue
        if normalisers:
            weights[d] = weight = normalisers[d].change_weights(
                resolved[d], rows, steps, weight, shared
            )
        norms.append(Norm(bias=weight.bias))
    return _recur(module, batch, weights, normalisers, resolved, norms)


def _project(rows: Tensor, weights: list[Weights]) -> tuple[Tensor, list[Weights]]:
    """Return gate inputs (N, D·C), and the weights without those of the input."""
    if weights[0].w_ih is None:
        return rows, weights
    gates = F.linear(rows, torch.cat([w.w_ih for w in weights]))  # type: ignore[misc]
    return gates, [w._replace(w_ih=None) for w in weights]


def _recur(
    module: Any,
    batch: Batch,
    weights: list[Weights],
    normalisers: Sequence[GateNorm],
    resolved: list[Resolved],
    norms: list[Any],
) -> tuple[Tensor, State]:
    steps, D = batch.steps, len(weights)
    rows = batch.rows
    if None in norms:  # a normaliser that has to be called
        gates, weights = _project(rows, weights)
        parts = list(gates.chunk(D, 1))
        for d, normaliser in enumerate(normalisers):
            if norms[d] is None:
                parts[d], norms[d] = normaliser(parts[d], steps), Norm()
        rows = torch.cat(parts, 1).to(batch.rows.dtype)
    zoneout = _zoneout(module, weights, steps) if any(module.zoneout) else (None, None)
    state, resets, mode = batch.state, batch.resets, module.mode
    norm = norms[0] if D == 1 else join_norms(norms)
    if norm is not None:
        states = state, resets, zoneout, batch.reset_to
        call = describe_call(mode, _REVERSE[D], rows, weights, norm, *states)
        result = recur(call[0], steps, call[1])
        _observe(result, normalisers, resolved)
        return result.rows, result.state
    # Normalisers of different modes: one direction after the other.
    gates, weights = _project(rows, weights)
    results = []
    for d, direction_gates in enumerate(gates.chunk(D, 1)):
        part = slice(d, d + 1)
        one = batch.states(itemgetter(part))
        kept: Any = tuple(None if kept is None else kept.chunk(D, 1)[d] for kept in zoneout)
        reverse = _REVERSE[D][part]
        states = one.state, resets, kept, one.reset_to
        spec, tensors = describe_call(
            mode, reverse, direction_gates, weights[part], norms[d], *states
        )
        results.append(recur(spec, steps, tensors))
        _observe(results[-1], normalisers[part], resolved[part])
    finals = zip(*[result.state for result in results], strict=True)
    return torch.cat([result.rows for result in results], 1), tuple(map(torch.cat, finals))


def join_norms(norms: list[Norm]) -> Norm | None:
    """Join the norms of two directions, their vectors side by side; None if they differ."""
    first, second = norms
    if first[: Norm.STATIC] != second[: Norm.STATIC]:
        return None
    joined = []
    for a, b in zip(first[Norm.STATIC :], second[Norm.STATIC :], strict=True):
        if (a is None) != (b is None):
            return None
        joined.append(None if a is None else torch.cat((a, b), -1))  # type: ignore[arg-type]
    return Norm(*first[: Norm.STATIC], *joined)


def _zoneout(
    module: Any, weights: Sequence[Weights], steps: Steps
) -> tuple[Tensor | None, Tensor | None]:
    """Return masks in training, the shares themselves at test time."""
    like = weights[0].w_hh
    units = len(weights) * like.shape[1]
    kept: list[Tensor | None] = [None, None]
    for k, share in enumerate(module.zoneout):
        if share and module.training:
            kept[k] = draw_mask((steps.rows, units), share, like)
        elif share:
            kept[k] = like.new_full((1, units), share)
    return kept[0], kept[1]


def _observe(result: Result, normalisers: Sequence[GateNorm], resolved: Sequence[Resolved]) -> None:
    """Pass the statistics of each direction to its normaliser."""
    if result.statistics is None:
        return
    mean, var, count = result.statistics
    pairs = zip(mean.chunk(len(normalisers), 1), var.chunk(len(normalisers), 1), strict=True)
    for d, pair in enumerate(pairs):
        normalisers[d].observe(resolved[d].mode, Statistics(*pair, count))


def zero_state(module: Any, weights: Sequence[Weights], batch: int) -> State:
    """Return the state that layers × directions begin with."""
    like, sizes = weights[0].w_hh, weights[0].state_sizes[: CELLS[module.mode].states]
    return tuple(like.new_zeros(len(weights), batch, size) for size in sizes)


def run_without_rows(module: Any, like: Tensor) -> Tensor:
    """Return 0, and take part in the statistics of other ranks that have rows.

    A rank without rows normalises nothing, layer by layer as the others do, forward and backward.
    """
    weights, normalisers, D = module.weights(), module.normalisers(), module.directions
    rows = like.new_zeros(0, weights[0].w_ih.shape[1])
    for first in range(0, len(weights), D):
        layer = slice(first, first + D)
        gates, _ = _project(rows, weights[layer])
        pairs = zip(normalisers[layer], gates.chunk(D, 1), strict=True)
        parts = [normaliser(gate, Steps((0,))) for normaliser, gate in pairs]
        rows = torch.cat(parts, 1)[:, : weights[-1].w_ih.shape[1]]
    return rows.sum()
