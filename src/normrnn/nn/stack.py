"""A stack of layers and directions, run on rows along one of the paths."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.nn.normaliser import GateNorm
from normrnn.ops.call import Call, Plain, Plug, State
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
        rows, final = one(layer, replace(given, rows=rows, state=state))
        finals.append(final)
        if last < len(stack.weights):
            rows = _dropped(rows, stack)
    return rows, tuple(torch.cat(parts) for parts in zip(*finals, strict=True))


def _dropped(rows: Tensor, stack: Stack) -> Tensor:
    """Dropout between layers.

    Of one direction, the mask is drawn feature by feature: so it always was, and runs that were
    stopped go on with the masks they would have had.
    """
    p = stack.dropout
    if not stack.training or not 0 < p < 1 or stack.directions == 2:
        return F.dropout(rows, p, stack.training)
    noise = torch.empty_like(rows.t(), memory_format=torch.contiguous_format).t()
    return rows * noise.bernoulli_(1 - p).div_(1 - p)


def _own(layer: Stack, given: Given) -> tuple[Tensor, State]:
    """One layer by our recurrence: both directions' projections are one product."""
    dtype, w_ih = layer.weights[0].cell.w_hh.dtype, [w.w_ih for w in layer.weights]
    pre = F.linear(given.rows, w_ih[0] if len(w_ih) == 1 else torch.cat(w_ih))
    if not torch.is_autocast_enabled(pre.device.type):
        return _recur(layer, given, pre)
    state = None if given.state is None else tuple(s.to(dtype) for s in given.state)
    with torch.autocast(pre.device.type, enabled=False):
        return _recur(layer, replace(given, state=state), pre.to(dtype))


def _recur(layer: Stack, given: Given, pre: Tensor) -> tuple[Tensor, State]:
    reverse = (False, True)[: layer.directions]
    pres, plugs = list(pre.chunk(layer.directions, 1)), []
    whole: Tensor | None = pre
    for d, (weights, normaliser) in enumerate(zip(layer.weights, layer.normalisers, strict=True)):
        plug = Plain(weights.bias) if normaliser is None else normaliser.plug(given.steps)
        if plug is None:
            assert normaliser is not None
            pres[d], plug = normaliser(pres[d], given.steps), Plain()
            whole = None
        plugs.append(plug)
    joined = _joined(plugs)
    if joined is not None:
        whole = torch.cat(pres, 1) if whole is None else whole
        return _observed(layer, given, whole, reverse, joined)
    # Normalisers of different modes: one direction after the other.
    results = []
    for d, plug in enumerate(plugs):
        one = replace(
            layer, weights=layer.weights[d : d + 1], normalisers=layer.normalisers[d : d + 1]
        )
        state = None if given.state is None else tuple(s[d : d + 1] for s in given.state)
        own = replace(given, state=state)
        results.append(_observed(one, own, pres[d], reverse[d : d + 1], plug))
    rows, states = zip(*results, strict=True)
    return torch.cat(rows, 1), tuple(torch.cat(parts) for parts in zip(*states, strict=True))


def _observed(
    layer: Stack, given: Given, pre: Tensor, reverse: tuple[bool, ...], plug: Plug
) -> tuple[Tensor, State]:
    cells = [w.cell for w in layer.weights]
    call = Call(layer.mode, given.steps, reverse)
    rows, state, measured = recur(call, pre, cells, given.state, plug)
    if measured is not None:
        mean, var = (value.chunk(len(cells), 1) for value in measured[:2])
        for d, normaliser in enumerate(layer.normalisers):
            assert normaliser is not None
            normaliser.observe(Statistics(mean[d], var[d], measured.count))
    return rows, state


def _joined(plugs: Sequence[Plug]) -> Any:
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
