"""A stack of layers and directions, run on rows along one of the paths."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.nn.normaliser import GateNorm
from normrnn.ops.call import Call, Cell, Inputs, Plain, State, Zoneout
from normrnn.ops.drop import drop_weights, locked_dropout, zoneout_mask
from normrnn.ops.fold import Weights, batch_fold, fused, fused_direction
from normrnn.ops.recurrence import recur
from normrnn.ops.statistics import Statistics
from normrnn.ops.steps import Steps


@dataclass(frozen=True)
class Stack:
    """A layer's parameters, per layer and direction in torch's order, and how it is run."""

    mode: str
    directions: int
    weights: Sequence[Weights]
    normalisers: Sequence[GateNorm | None]
    dropout: float
    training: bool
    dropout_kind: str = "element"
    weight_drop: float = 0.0
    zoneout: tuple[float, ...] = ()

    @property
    def cells(self) -> list[Cell]:
        return [w.cell for w in self.weights]


@dataclass(frozen=True)
class Given:
    """What a stack, or one layer of it, is given."""

    rows: Tensor
    """(N, I)."""
    steps: Steps
    state: State | None
    """(layers × directions, B, H) each; None for zeros."""
    batch_sizes: Tensor | None
    """None for a dense batch, which torch's kernels take another way."""
    resets: Tensor | None = None
    """Rows (N,), for our own recurrence alone: torch's kernels know none."""

    def started(self, mode: str, cells: Sequence[Cell]) -> State:
        """The state, made if there is none: torch's kernels insist on one."""
        return zeros(mode, cells, self.steps.batch) if self.state is None else self.state


def zeros(mode: str, cells: Sequence[Cell], batch: int) -> State:
    """The state that layers × directions begin with."""
    sizes = cells[0].sizes[: 2 if mode == "LSTM" else 1]
    return tuple(cells[0].w_hh.new_zeros(len(cells), batch, size) for size in sizes)


def run(stack: Stack, given: Given, folded: bool) -> tuple[Tensor, State]:
    """Rows (N, directions × H) and the final states; ``folded``: by torch's kernels."""
    if folded and all(n is not None and n.is_fixed_map for n in stack.normalisers):
        return _test_time(stack, given)
    D, rows, finals = stack.directions, given.rows, []
    for first in range(0, len(stack.weights), D):
        last = first + D
        state = None if given.state is None else tuple(s[first:last] for s in given.state)
        layer, part = stack, given
        if len(stack.weights) > D:
            own = stack.weights[first:last], stack.normalisers[first:last]
            layer = replace(stack, weights=own[0], normalisers=own[1])
            part = replace(given, rows=rows, state=state)
        rows, final = (_folded_by_batch if folded else _own)(layer, part)
        finals.append(final)
        if last < len(stack.weights):
            rows = _dropped(rows, given.steps, stack)
    if len(finals) == 1:
        return rows, finals[0]
    return rows, tuple(torch.cat(parts) for parts in zip(*finals, strict=True))


def meet(
    weights: Sequence[Weights], normalisers: Sequence[GateNorm], directions: int, like: Tensor
) -> Tensor:
    """0, by a rank that has no rows: it takes part in the statistics of the others, forward and
    backward, layer by layer as they do."""
    rows = like.new_zeros(0, weights[0].w_ih.shape[1])
    for first in range(0, len(weights), directions):
        own = slice(first, first + directions)
        gates = F.linear(rows, torch.cat([w.w_ih for w in weights[own]])).chunk(directions, 1)
        parts = [n(g, Steps((0,))) for n, g in zip(normalisers[own], gates, strict=True)]
        width = weights[-1].w_ih.shape[1]
        rows = torch.cat(parts, 1)[:, :width]
    return rows.sum()


def _dropped(rows: Tensor, steps: Steps, stack: Stack) -> Tensor:
    """Apply dropout between layers; masks are drawn in the order in which torch draws them."""
    if stack.dropout_kind == "locked" and stack.training and stack.dropout:
        return locked_dropout(rows, steps, stack.dropout)
    return F.dropout(rows, stack.dropout, stack.training)


def _own(layer: Stack, given: Given) -> tuple[Tensor, State]:
    """One layer by our recurrence, which makes one product of both directions' projections."""
    if layer.training and layer.weight_drop:
        dropped = [
            w._replace(cell=w.cell._replace(w_hh=drop_weights(w.cell.w_hh, layer.weight_drop)))
            for w in layer.weights
        ]
        layer = replace(layer, weights=dropped)
    layer = _mapped(layer, given)
    w_ih, rows, state = [w.w_ih for w in layer.weights], given.rows, given.state
    kind = rows.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return _recur(layer, given, Inputs(rows, layer.cells, state, w_ih))
    dtype = layer.cells[0].w_hh.dtype
    pre = F.linear(rows, torch.cat(w_ih)).to(dtype)
    state = None if state is None else tuple(s.to(dtype) for s in state)
    with torch.autocast(kind, enabled=False):
        return _recur(layer, given, Inputs(pre, layer.cells, state))


def _mapped(layer: Stack, given: Given) -> Stack:
    """Normalisers that are a map of the input go into plain weights."""
    weights, normalisers, known = list(layer.weights), list(layer.normalisers), {}
    for d, normaliser in enumerate(normalisers):
        if normaliser is None:
            continue
        found = normaliser.mapped(given.rows, given.steps, weights[d], known)
        if found is not None:
            weights[d], normalisers[d] = found, None
    same = all(a is b for a, b in zip(normalisers, layer.normalisers, strict=True))
    return layer if same else replace(layer, weights=weights, normalisers=normalisers)


def _recur(layer: Stack, given: Given, inputs: Inputs) -> tuple[Tensor, State]:
    steps = given.steps
    plugs = [
        Plain(weights.bias) if normaliser is None else normaliser.plug(steps)
        for weights, normaliser in zip(layer.weights, layer.normalisers, strict=True)
    ]
    if None in plugs:  # a normaliser that has to be called
        pre = F.linear(inputs.x, torch.cat(list(inputs.w_ih))) if inputs.w_ih else inputs.x
        parts = list(pre.chunk(layer.directions, 1))
        for d, normaliser in enumerate(layer.normalisers):
            if plugs[d] is None and normaliser is not None:
                parts[d], plugs[d] = normaliser(parts[d], steps), Plain()
        inputs = inputs._replace(x=torch.cat(parts, 1), w_ih=())
    joined, zoneout = _joined(plugs), _zoneout(layer, steps)
    if joined is not None:
        return _observed(layer, (0, layer.directions), given, inputs, joined, zoneout)
    # Normalisers of different modes: one direction after the other.
    gates = () if inputs.w_ih else inputs.x.chunk(layer.directions, 1)
    results = []
    for d, plug in enumerate(plugs):
        one = Inputs(
            inputs.x if inputs.w_ih else gates[d],
            inputs.cells[d : d + 1],
            None if inputs.state is None else tuple(s[d : d + 1] for s in inputs.state),
            inputs.w_ih[d : d + 1],
        )
        H = inputs.cells[d].w_hh.shape[1]
        kept = zoneout.of(slice(d * H, (d + 1) * H))
        results.append(_observed(layer, (d, d + 1), given, one, plug, kept))
    rows, states = zip(*results, strict=True)
    return torch.cat(rows, 1), tuple(torch.cat(parts) for parts in zip(*states, strict=True))


def _zoneout(layer: Stack, steps: Steps) -> Zoneout:
    """Masks in training, the shares themselves at test time."""
    like = layer.cells[0].w_hh
    units = layer.directions * like.shape[1]
    kept: list[Any] = [None, None]
    for k, share in enumerate(layer.zoneout):
        if share and layer.training:
            kept[k] = zoneout_mask(steps.rows, units, share, like)
        elif share:
            kept[k] = like.new_full((1, units), share)
    return Zoneout(*kept)


def _observed(
    layer: Stack,
    which: tuple[int, int],
    given: Given,
    inputs: Inputs,
    plug: Any,
    zoneout: Zoneout,
) -> tuple[Tensor, State]:
    """Directions ``which``; their normalisers are told the statistics."""
    reverse = (False, True)[slice(*which)]
    call = Call(layer.mode, given.steps, reverse, given.resets, zoneout)
    rows, state, measured = recur(call, inputs, plug)
    if measured is not None:
        normalisers = layer.normalisers[slice(*which)]
        parts = [measured]
        if len(normalisers) > 1:
            mean, var = (value.chunk(len(normalisers), 1) for value in measured[:2])
            pairs = zip(mean, var, strict=True)
            parts = [Statistics(m, v, measured.count) for m, v in pairs]
        for normaliser, part in zip(normalisers, parts, strict=True):
            assert normaliser is not None
            normaliser.observe(part)
    return rows, state


def _joined(plugs: Sequence[Any]) -> Any:
    """Plugs of the directions as one, their vectors side by side; None if they differ in kind."""
    if len(plugs) == 1:
        return plugs[0]
    if len({type(plug) for plug in plugs}) > 1:
        return None
    values: dict[str, Any] = {}
    for field in fields(plugs[0]):
        parts = [getattr(plug, field.name) for plug in plugs]
        if all(isinstance(part, Tensor) for part in parts):
            values[field.name] = torch.cat(parts, -1)
        elif all(isinstance(part, tuple) for part in parts):  # a mean and a variance
            values[field.name] = tuple(torch.cat(pair, -1) for pair in zip(*parts, strict=True))
        elif parts[0] == parts[1]:
            values[field.name] = parts[0]
        else:
            return None
    return type(plugs[0])(**values)


def _folded_by_batch(layer: Stack, given: Given) -> tuple[Tensor, State]:
    """Training, sequence-wise: torch's kernel with weights folded by the batch itself."""
    results, state = [], given.started(layer.mode, layer.cells)
    for d, (weights, n) in enumerate(zip(layer.weights, layer.normalisers, strict=True)):
        assert n is not None
        if n.is_alone(given.steps):
            plain = n.folded(weights)
        else:
            plain, (mean, var) = batch_fold(given.rows, weights, n.weight, n.bias, n.eps)
            n.observe(Statistics(mean, var, mean.new_full((1,), given.steps.rows)))
        result = fused_direction(
            layer.mode,
            given.rows,
            tuple(s[d : d + 1] for s in state),
            plain,
            given.steps,
            batch_sizes=given.batch_sizes,
            reverse=d == 1,
        )
        results.append(result)
    rows, states = zip(*results, strict=True)
    return torch.cat(rows, 1), tuple(torch.cat(both) for both in zip(*states, strict=True))


def _test_time(stack: Stack, given: Given) -> tuple[Tensor, State]:
    """With statistics shared over time the whole stack is one call of torch's kernel."""
    pairs = zip(stack.weights, stack.normalisers, strict=True)
    flat = [tensor for w, n in pairs if n is not None for tensor in n.folded(w).flat()]
    steps = given.steps
    dense = given.batch_sizes is None
    output, *final = fused(
        stack.mode,
        given.rows.view(steps.time, steps.batch, -1) if dense else given.rows,
        given.started(stack.mode, stack.cells),
        flat,
        batch_sizes=given.batch_sizes,
        num_layers=len(stack.weights) // stack.directions,
        dropout=stack.dropout,
        training=stack.training,  # with frozen normalisers it may be: dropout stays
        bidirectional=stack.directions == 2,
    )
    return output.reshape(steps.rows, -1), tuple(final)
