"""A stack of layers and directions, run on rows along one of the paths."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.nn.normaliser import GateNorm
from normrnn.ops.call import Call, Cell, Inputs, Plain, State
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

    def started(self, parts: int, count: int, like: Tensor) -> State:
        """The state, made if there is none: torch's kernels insist on one."""
        if self.state is not None:
            return self.state
        zeros = like.new_zeros(count, self.steps.batch, like.shape[1])
        return (zeros,) * parts


def run(stack: Stack, given: Given, folded: bool) -> tuple[Tensor, State]:
    """Rows (N, directions × H) and the final states; ``folded``: by torch's kernels."""
    if folded and all(n is not None and n.is_fixed_map for n in stack.normalisers):
        return _test_time(stack, given)
    D, rows, finals = stack.directions, given.rows, []
    for first in range(0, len(stack.weights), D):
        last = first + D
        state = None if given.state is None else tuple(s[first:last] for s in given.state)
        layer = replace(
            stack,
            weights=stack.weights[first:last],
            normalisers=stack.normalisers[first:last],
        )
        one = _folded_by_batch if folded else _own
        rows, final = one(layer, Given(rows, given.steps, state, given.batch_sizes))
        finals.append(final)
        if last < len(stack.weights):
            rows = _dropped(rows, stack)
    if len(finals) == 1:
        return rows, finals[0]
    return rows, tuple(torch.cat(parts) for parts in zip(*finals, strict=True))


def _dropped(rows: Tensor, stack: Stack) -> Tensor:
    """Dropout between layers.

    Of one direction, the mask is drawn feature by feature: so it always was, and runs that were
    stopped go on with the masks they would have had.
    """
    p = stack.dropout
    plain = stack.normalisers[0] is None  # as torch draws them
    if not stack.training or not 0 < p < 1 or stack.directions == 2 or plain:
        return F.dropout(rows, p, stack.training)
    noise = torch.empty_like(rows.t(), memory_format=torch.contiguous_format).t()
    return rows * noise.bernoulli_(1 - p).div_(1 - p)


def _own(layer: Stack, given: Given) -> tuple[Tensor, State]:
    """One layer by our recurrence, which makes one product of both directions' projections."""
    w_ih, rows, state = [w.w_ih for w in layer.weights], given.rows, given.state
    if not torch.is_autocast_enabled(rows.device.type):
        return _recur(layer, given.steps, Inputs(rows, layer.cells, state, w_ih))
    dtype = layer.cells[0].w_hh.dtype
    pre = F.linear(rows, torch.cat(w_ih)).to(dtype)
    state = None if state is None else tuple(s.to(dtype) for s in state)
    with torch.autocast(rows.device.type, enabled=False):
        return _recur(layer, given.steps, Inputs(pre, layer.cells, state))


def _recur(layer: Stack, steps: Steps, inputs: Inputs) -> tuple[Tensor, State]:
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
    joined = _joined(plugs)
    if joined is not None:
        return _observed(layer, (0, layer.directions), steps, inputs, joined)
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
        results.append(_observed(layer, (d, d + 1), steps, one, plug))
    rows, states = zip(*results, strict=True)
    return torch.cat(rows, 1), tuple(torch.cat(parts) for parts in zip(*states, strict=True))


def _observed(
    layer: Stack, which: tuple[int, int], steps: Steps, inputs: Inputs, plug: Any
) -> tuple[Tensor, State]:
    """Directions ``which``; their normalisers are told the statistics."""
    call = Call(layer.mode, steps, (False, True)[slice(*which)])
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
    results, parts = [], 2 if layer.mode == "LSTM" else 1
    state = given.started(parts, layer.directions, layer.weights[0].cell.w_hh)
    for d, (weights, n) in enumerate(zip(layer.weights, layer.normalisers, strict=True)):
        assert n is not None
        n.plug(given.steps)  # which looks whether there are rows enough
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
    steps, parts = given.steps, 2 if stack.mode == "LSTM" else 1
    dense = given.batch_sizes is None
    output, *final = fused(
        stack.mode,
        given.rows.view(len(steps), steps.batch, -1) if dense else given.rows,
        given.started(parts, len(stack.weights), stack.weights[0].cell.w_hh),
        flat,
        batch_sizes=given.batch_sizes,
        num_layers=len(stack.weights) // stack.directions,
        dropout=stack.dropout,
        training=stack.training,  # with frozen normalisers it may be: dropout stays
        bidirectional=stack.directions == 2,
    )
    return output.reshape(steps.rows, -1), tuple(final)
