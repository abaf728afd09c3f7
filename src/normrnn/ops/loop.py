"""The recurrence in torch's own operations: one time loop for all cells, directions and plugs.

A pure function that autograd differentiates, any number of times, on any device and in any type.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.ops.call import (
    Call,
    Cell,
    InputNorm,
    Inputs,
    Plain,
    Plug,
    RecurrentNorm,
    Result,
    RowNorm,
    State,
    StepNorm,
)
from normrnn.ops.normalise import normalise
from normrnn.ops.statistics import EVERYBODY, LONE, Groups, Pool, Statistics, wide
from normrnn.ops.steps import Steps


def loop(call: Call, inputs: Inputs, plug: Plug) -> Result:
    """See :func:`normrnn.ops.recurrence.recur`."""
    kind, (pre, cells, state, w_ih) = _INSIDE[type(plug)], inputs
    if w_ih:  # the projections of all directions are one product
        pre = F.linear(pre, w_ih[0] if len(w_ih) == 1 else torch.cat(list(w_ih)))
    gates, measured = kind.before(plug, call, pre)
    if state is None:
        parts = cells[0].sizes[: 2 if call.mode == "LSTM" else 1]
        state = tuple(pre.new_zeros(len(cells), call.steps.batch, size) for size in parts)
    insides = [kind(plug, call, d) for d in range(len(cells))]
    rows, finals = [], []
    for d, own in enumerate(gates.chunk(len(cells), 1)):
        start, inside = tuple(s[d] for s in state), insides[d]
        states, final = _direction(call, d, inside.gates(own), cells[d], start, inside)
        rows.append(states)
        finals.append(final)
    last = tuple(torch.stack(parts) for parts in zip(*finals, strict=True))
    return Result(torch.cat(rows, 1), last, measured or _joined([i.measured() for i in insides]))


def _direction(
    call: Call, d: int, gates: Tensor, cell: Cell, start: State, inside: "Inside"
) -> tuple[Tensor, State]:
    """Gate inputs (N, C) and a state of (B, H) each -> states h (N, H), the final state."""
    step, cut, sizes = STEPS[call.mode], call.steps.cut(gates), call.steps.sizes
    kept, reverse = _kept(call, d, cell.w_hh.shape[1]), call.reverse[d]
    order = call.steps.order(reverse)
    resets = () if call.resets is None else call.steps.cut(call.resets.unsqueeze(1))
    state = tuple(s[: sizes[order[0]]] for s in start)
    outputs: dict[int, Tensor] = {}
    ended: list[State] = []  # final states, the shortest sequences' first
    for t in order:
        have, width = len(state[0]), sizes[t]
        if have > width:  # forwards, some sequences have ended
            ended.append(tuple(s[width:] for s in state))
            state = tuple(s[:width] for s in state)
        later = t + 1 if reverse else t  # the frame that may be cut off from the one before it
        if later < len(resets):
            state = tuple(s.masked_fill(resets[later], 0) for s in state)
        if have < width:  # backwards, some begin
            state = tuple(
                torch.cat([s, s0[have:width]]) for s, s0 in zip(state, start, strict=True)
            )
        after = step(t, cut[t], state, cell, inside)
        state = tuple(
            new if stays is None else _zoned(old, new, stays[t])
            for old, new, stays in zip(state, after, kept, strict=False)
        )
        outputs[t] = state[0]
    rows = torch.cat([outputs[t] for t in range(len(sizes))])
    return rows, tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))


def one_step(mode: str, rows: Tensor, w_ih: Tensor, cell: Cell, state: Any, plug: Plug) -> State:
    """The state (B, H) each after one step of rows (B, I), normalised row by row or not at all.

    Nothing is cut by the number of rows: a trace of it serves other batches too.
    """
    kind, call = _INSIDE[type(plug)], Call(mode, Steps.dense(1, 1))
    gates, _ = kind.before(plug, call, F.linear(rows, w_ih))
    if state is None:
        parts = cell.sizes[: 2 if mode == "LSTM" else 1]
        state = tuple(torch.zeros_like(gates[:, :size]) for size in parts)
    return STEPS[mode](0, gates, state, cell, kind(plug, call, 0))


def _zoned(old: Tensor, new: Tensor, stays: Tensor) -> Tensor:
    if stays.dtype == torch.bool:
        return torch.where(stays, old, new)
    return torch.lerp(new, old, stays)


def _kept(call: Call, d: int, units: int) -> list[Any]:
    """What zoneout keeps of h and of c, step by step; None: nothing."""
    own = call.zoneout.of(slice(d * units, (d + 1) * units))
    return [
        None if kept is None else call.steps.cut(kept.expand(call.steps.rows, units))
        for kept in own
    ]


def input_norm(
    plug: InputNorm, steps: Steps, pre: Tensor, ranks: Pool = EVERYBODY, directions: int = 1
) -> tuple[Tensor, Statistics | None]:
    """Gate inputs (N, D·C), normalised, and the statistics of the batch."""
    by_step = plug.per_step
    if not plug.batch and plug.fixed is not None:  # shared over time they need no groups
        by_step = len(plug.fixed[0]) > 1
    fixed = plug.fixed
    if by_step and fixed is not None and len(fixed[0]) > 1:
        # A padded batch may have statistics of more steps than its longest sequence.
        fixed = fixed[0][: steps.time], fixed[1][: steps.time]
    return normalise(
        pre,
        plug.weight,
        plug.bias,
        Groups.frame(steps) if by_step else Groups.sequence(steps),
        eps=plug.eps,
        fixed=fixed,
        batch=plug.batch,
        sync=plug.sync,
        ranks=ranks,
        directions=directions if plug.per_step else 0,
    )


def _rnn(phi: Callable[[Tensor], Tensor]) -> Any:
    """h_t = φ(a_t + W_h h_{t−1})."""

    def step(t: int, gates: Tensor, state: State, cell: Cell, inside: "Inside") -> State:
        (h,) = state
        return (phi(inside.sums(t, gates + inside.recurrent(t, h @ cell.w_hh.t()))),)

    return step


def _lstm(t: int, gates: Tensor, state: State, cell: Cell, inside: "Inside") -> State:
    """Paper, section 3.1; gate order i, f, g, o. Peephole terms come after any normalisation."""
    (h, c), (pi, pf, po) = state, cell.peephole
    i, f, g, o = inside.sums(t, gates + inside.recurrent(t, h @ cell.w_hh.t())).chunk(4, 1)
    i = i if pi is None else i + pi * c
    f = f if pf is None else f + pf * c
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    o = o if po is None else o + po * c
    h = o.sigmoid() * inside.cell(t, c).tanh()
    return (h if cell.w_hr is None else h @ cell.w_hr.t()), c


def _gru(t: int, gates: Tensor, state: State, cell: Cell, inside: "Inside") -> State:
    """h_t = (1−z) n + z h_{t−1}, n = tanh(a_n + r (W_hn h_{t−1} + b_hn)), as in torch."""
    (h,) = state
    inner = 2 * h.shape[1]
    wh = inside.recurrent(t, h @ cell.w_hh.t())
    r, z = inside.sums(t, gates[:, :inner] + wh[:, :inner]).sigmoid().chunk(2, 1)
    q = wh[:, inner:] if cell.bias_hn is None else wh[:, inner:] + cell.bias_hn
    n = inside.sums(t, gates[:, inner:] + r * q, inner).tanh()
    return (n + z * (h - n),)


STEPS = {"RNN_TANH": _rnn(torch.tanh), "RNN_RELU": _rnn(torch.relu), "LSTM": _lstm, "GRU": _gru}


class Inside:
    """What a plug does before the loop, and inside it to one direction: here nothing."""

    def __init__(self, plug: Any, call: Call, d: int):
        self.plug, self.call, self.d = plug, call, d

    @staticmethod
    def before(plug: Any, call: Call, pre: Tensor) -> tuple[Tensor, Statistics | None]:  # noqa: ARG004
        """Of all gate inputs (N, D·C), and what was measured."""
        return (pre if plug.bias is None else pre + plug.bias), None

    def gates(self, own: Tensor) -> Tensor:
        """Of this direction's gate inputs (N, C), after ``before``."""
        return own

    def recurrent(self, t: int, wh: Tensor) -> Tensor:  # noqa: ARG002
        """Of W_h h, (n, C)."""
        return wh

    def sums(self, t: int, sums: Tensor, first: int = 0) -> Tensor:  # noqa: ARG002
        """Of W_x x + W_h h, (n, C′): the channels from ``first`` on."""
        return sums

    def cell(self, t: int, c: Tensor) -> Tensor:  # noqa: ARG002
        """Of the LSTM's c before tanh, (n, H)."""
        return c

    def measured(self) -> Statistics | None:
        return None

    def own(self, value: Tensor | None, first: int, width: int) -> Tensor | None:
        """Of a vector (D·C,) this direction's entries from ``first`` on."""
        if value is None:
            return None
        start = self.d * (value.shape[-1] // len(self.call.reverse)) + first
        return value[..., start : start + width]


class _InputNorm(Inside):
    @staticmethod
    def before(plug: InputNorm, call: Call, pre: Tensor) -> tuple[Tensor, Statistics | None]:
        return input_norm(plug, call.steps, pre, directions=len(call.reverse))


class _ByStep(Inside):
    """What is normalised by the rows of a step."""

    def __init__(self, plug: Any, call: Call, d: int):
        super().__init__(plug, call, d)
        self.seen: dict[int, list[Statistics]] = {}

    @staticmethod
    def before(plug: Any, call: Call, pre: Tensor) -> tuple[Tensor, Statistics | None]:
        if plug.fixed is None and (not plug.batch or call.steps.sizes[-1] == 1):
            raise ValueError(LONE)
        return pre, None

    def given(self, first: int, width: int, slots: slice = slice(None)) -> Any:
        """Of the given statistics, if any, this direction's channels from ``first`` on."""
        if self.plug.fixed is None:
            return None
        own: list[Any] = [self.own(value, first, width) for value in self.plug.fixed]
        return tuple(value[slots] if len(value) > 1 else value for value in own)

    def normalised(
        self, t: int, rows: Tensor, weight: Tensor | None, bias: Tensor | None, first: int
    ) -> Tensor:
        """Rows (n, C′) of step t, whose statistics are the channels from ``first`` on."""
        out, measured = normalise(
            rows,
            weight,
            bias,
            Groups.sequence(self.call.steps.at(t)),
            eps=self.plug.eps,
            fixed=self.given(first, rows.shape[1], slice(t, t + 1)),
            batch=self.plug.batch,
        )
        if measured is not None:
            self.seen.setdefault(t, []).append(measured)
        return out

    def measured(self) -> Statistics | None:
        if not self.seen:
            return None
        steps = [_joined(self.seen[t]) for t in range(len(self.call.steps))]
        return Statistics(*(torch.cat(parts) for parts in zip(*steps, strict=True)))


class _StepNorm(_ByStep):
    def sums(self, t: int, sums: Tensor, first: int = 0) -> Tensor:
        width = sums.shape[1]
        weight, bias = (self.own(v, first, width) for v in (self.plug.weight, self.plug.bias))
        return self.normalised(t, sums, weight, bias, first)


class _RecurrentNorm(_ByStep):
    def gates(self, own: Tensor) -> Tensor:
        plug, C = self.plug, own.shape[1]
        weight, bias = (self.own(v, 0, C) for v in (plug.weight, plug.bias))
        norm = InputNorm(weight, bias, plug.eps, True, plug.batch, self.given(0, C))
        out, self.of_input = input_norm(norm, self.call.steps, own)
        return out

    def recurrent(self, t: int, wh: Tensor) -> Tensor:
        C = wh.shape[1]
        return self.normalised(t, wh, self.own(self.plug.gamma_hh, 0, C), None, C)

    def cell(self, t: int, c: Tensor) -> Tensor:
        if not self.plug.cell:
            return c
        H = c.shape[1]
        weight, bias = (self.own(v, 0, H) for v in (self.plug.weight_c, self.plug.bias_c))
        return self.normalised(t, c, weight, bias, 2 * 4 * H)  # after those of pre and W_h h

    def measured(self) -> Statistics | None:
        inside = super().measured()
        return None if inside is None else _joined([self.of_input, inside])


class InsideRowNorm(Inside):
    @staticmethod
    def before(plug: RowNorm, call: Call, pre: Tensor) -> tuple[Tensor, Statistics | None]:
        rows = pre.unflatten(1, (len(call.reverse), -1))
        out = _standardised(rows, plug.eps).flatten(1)
        return _affine(out, plug.weight, plug.bias).to(pre.dtype), None

    def recurrent(self, t: int, wh: Tensor) -> Tensor:  # noqa: ARG002
        weight = self.own(self.plug.gamma_hh, 0, wh.shape[1])
        return _affine(_standardised(wh, self.plug.eps), weight, None).to(wh.dtype)

    def cell(self, t: int, c: Tensor) -> Tensor:  # noqa: ARG002
        if not self.plug.cell:
            return c
        weight, bias = (self.own(v, 0, c.shape[1]) for v in (self.plug.weight_c, self.plug.bias_c))
        return _affine(_standardised(c, self.plug.eps), weight, bias).to(c.dtype)


def _standardised(rows: Tensor, eps: float) -> Tensor:
    """Mean 0 and variance 1 over the last dimension, in float32 or wider."""
    rows = rows.to(wide(rows.dtype))
    if torch.jit.is_tracing():  # sizes are traced, and ONNX wants this one as a number: strides are
        rows = rows.contiguous()
        return F.layer_norm(rows, rows.stride()[-2:-1], eps=eps)
    return F.layer_norm(rows, rows.shape[-1:], eps=eps)


def _affine(rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    rows = rows if weight is None else rows * weight
    return rows if bias is None else rows + bias


def _joined(parts: Sequence[Any]) -> Any:
    """Statistics of neighbouring channels as one; None if there are none."""
    if parts[0] is None:
        return None
    mean, var = (torch.cat([part[k] for part in parts], 1) for k in (0, 1))
    return Statistics(mean, var, parts[0].count)


_INSIDE: dict[type, type[Inside]] = {
    Plain: Inside,
    InputNorm: _InputNorm,
    StepNorm: _StepNorm,
    RowNorm: InsideRowNorm,
    RecurrentNorm: _RecurrentNorm,
}
