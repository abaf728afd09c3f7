"""The recurrence in torch's own operations: one time loop for all cells, directions and norms.

A pure function that autograd differentiates, any number of times, on any device and in any type.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.ops.call import CELLS, Norm, Result, Spec, State, Tensors, Weights, check_given
from normrnn.ops.layout import Steps
from normrnn.ops.normalise import normalise
from normrnn.ops.statistics import Groups, Statistics, wide
from normrnn.ops.sync import Pool


def loop(spec: Spec, steps: Steps, tensors: Tensors) -> Result:
    """Run all directions; see :func:`normrnn.ops.recurrence.recur`."""
    check_given(spec, steps, tensors)
    D, pre = len(spec.reverse), tensors.x
    weights = [tensors.weights(d) for d in range(D)]
    if tensors.w_ih is not None:  # one product for the projections of all directions
        pre = F.linear(pre, torch.cat([w.w_ih for w in weights]))  # type: ignore[misc]
    kind = StepNorm.KINDS[spec.kind]
    gates, measured = kind.before(spec, steps, tensors, pre)
    state = initial_state(spec, tensors, steps.batch, pre)
    norms = [kind(spec, steps, tensors, d) for d in range(D)]
    rows, finals = [], []
    for d, own in enumerate(gates.chunk(D, 1)):
        start = tuple(s[d] for s in state)
        outputs, final = _direction(spec, steps, tensors, norms[d], norms[d].gates(own), start)
        rows.append(outputs)
        finals.append(final)
    last = tuple(torch.stack(parts) for parts in zip(*finals, strict=True))
    found = measured or _joined([norm.measured() for norm in norms])
    return Result(torch.cat(rows, 1), last, found)


def initial_state(spec: Spec, tensors: Tensors, batch: int, like: Tensor) -> State:
    """Return the initial state of a call, zeros if it has none."""
    if tensors.h0 is not None:
        return (tensors.h0,) if tensors.c0 is None else (tensors.h0, tensors.c0)
    sizes = tensors.weights(0).state_sizes[: spec.states]
    return tuple(like.new_zeros(len(spec.reverse), batch, size) for size in sizes)


def reset_state(tensors: Tensors, direction: int) -> State | None:
    """Return the state of (B, H) each that a reset of this direction starts from; None: zeros."""
    parts = tensors.reset_h, tensors.reset_c
    return tuple(part[direction] for part in parts if part is not None) or None


def _direction(
    spec: Spec, steps: Steps, tensors: Tensors, norm: "StepNorm", gates: Tensor, start: State
) -> tuple[Tensor, State]:
    """Gate inputs (N, C) and a state of (B, H) each -> outputs h (N, H), the final state."""
    reverse, weights = spec.reverse[norm.d], tensors.weights(norm.d)
    step, cut, sizes = STEPS[spec.mode], steps.cut(gates), steps.sizes
    kept = _zoneout(steps, tensors, norm.d, len(spec.reverse))
    order = range(steps.time - 1, -1, -1) if reverse else range(steps.time)
    resets = () if tensors.resets is None else steps.cut(tensors.resets.unsqueeze(1))
    reset_to = reset_state(tensors, norm.d)
    state = tuple(s[: sizes[order[0]]] for s in start)
    outputs: dict[int, Tensor] = {}
    ended: list[State] = []  # final states, the shortest sequences' first
    for t in order:
        have, width = len(state[0]), sizes[t]
        if have > width:  # forward: some sequences have ended
            ended.append(tuple(s[width:] for s in state))
            state = tuple(s[:width] for s in state)
        later = t + 1 if reverse else t  # a reset cuts between this frame and the one before it
        if later < len(resets) and reset_to is None:
            state = tuple(s.masked_fill(resets[later], 0) for s in state)
        elif later < len(resets):
            pairs = zip(reset_to, state, strict=True)
            state = tuple(torch.where(resets[later], new[: len(s)], s) for new, s in pairs)
        if have < width:  # backward: some sequences begin
            state = tuple(
                torch.cat([s, s0[have:width]]) for s, s0 in zip(state, start, strict=True)
            )
        after = step(t, cut[t], state, weights, norm)
        state = tuple(
            new if stays is None else _zoned(old, new, stays[t])
            for old, new, stays in zip(state, after, kept, strict=False)
        )
        outputs[t] = state[0]
    rows = torch.cat([outputs[t] for t in range(len(sizes))])
    return rows, tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))


def one_step(mode: str, rows: Tensor, weights: Weights, state: Any, norm: Norm) -> State:
    """Return the state (B, H) each after one step of rows (B, I), normalised row by row or not.

    Nothing depends on the number of rows: a trace of it serves other batches too.
    """
    assert weights.w_ih is not None
    spec, steps = Spec(mode, (False,), *norm[: Norm.STATIC]), Steps.dense(1, 1)
    own = norm[Norm.STATIC :] + weights[: Weights.IN_CALL]
    tensors = Tensors(rows, *[None] * (Tensors.NORM - 1), *own)  # type: ignore[arg-type]
    kind = StepNorm.KINDS[spec.kind]
    gates, _ = kind.before(spec, steps, tensors, F.linear(rows, weights.w_ih))
    if state is None:
        sizes = weights.state_sizes[: CELLS[mode].states]
        state = tuple(torch.zeros_like(gates[:, :size]) for size in sizes)
    return STEPS[mode](0, gates, state, weights, kind(spec, steps, tensors, 0))


def _zoned(old: Tensor, new: Tensor, stays: Tensor) -> Tensor:
    if stays.dtype == torch.bool:
        return torch.where(stays, old, new)
    return torch.lerp(new, old, stays)


def zoneout_of(tensors: Tensors, direction: int, directions: int) -> list[Tensor | None]:
    """Return what zoneout keeps of h and of c in one direction; None: nothing."""
    both = tensors.zoneout_h, tensors.zoneout_c
    return [None if kept is None else kept.chunk(directions, 1)[direction] for kept in both]


def _zoneout(steps: Steps, tensors: Tensors, direction: int, directions: int) -> list[Any]:
    return [
        None if kept is None else steps.cut(kept.expand(steps.rows, -1))
        for kept in zoneout_of(tensors, direction, directions)
    ]


def normalise_input(
    norm: Norm, steps: Steps, pre: Tensor, pool: Pool | None = None, directions: int = 1
) -> tuple[Tensor, Statistics | None]:
    """Normalise gate inputs (N, D·C); also return the statistics of the batch."""
    per_step, given = norm.per_step, None
    if norm.mean is not None and norm.var is not None:
        has_slots = len(norm.mean) > 1
        if not norm.batch:  # shared over time they need no groups
            per_step = has_slots
        given = norm.mean, norm.var
        if per_step and has_slots:
            # A padded batch may have statistics of more steps than its longest sequence.
            given = norm.mean[: steps.time], norm.var[: steps.time]
    return normalise(
        pre,
        norm.weight,
        norm.bias,
        Groups.frame(steps) if per_step else Groups.sequence(steps),
        eps=norm.eps,
        given=given,
        batch=norm.batch,
        pool=pool,
        directions=directions if norm.per_step else 0,
    )


def _rnn(phi: Callable[[Tensor], Tensor]) -> Any:
    """h_t = φ(a_t + W_h h_{t−1})."""

    def step(t: int, gates: Tensor, state: State, weights: Weights, norm: "StepNorm") -> State:
        (h,) = state
        return (phi(norm.sums(t, gates + norm.recurrent(t, h @ weights.w_hh.t()))),)

    return step


def _lstm(t: int, gates: Tensor, state: State, weights: Weights, norm: "StepNorm") -> State:
    """Paper, section 3.1; gate order i, f, g, o. Peephole terms come after any normalisation."""
    (h, c), (pi, pf, po, w_hr) = state, weights[3:7]
    i, f, g, o = norm.sums(t, gates + norm.recurrent(t, h @ weights.w_hh.t())).chunk(4, 1)
    i = i if pi is None else i + pi * c
    f = f if pf is None else f + pf * c
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    o = o if po is None else o + po * c
    h = o.sigmoid() * norm.cell(t, c).tanh()
    return (h if w_hr is None else h @ w_hr.t()), c


def _gru(t: int, gates: Tensor, state: State, weights: Weights, norm: "StepNorm") -> State:
    """h_t = (1−z) n + z h_{t−1}, n = tanh(a_n + r (W_hn h_{t−1} + b_hn)), as in torch."""
    (h,) = state
    inner = 2 * h.shape[1]
    wh = norm.recurrent(t, h @ weights.w_hh.t())
    r, z = norm.sums(t, gates[:, :inner] + wh[:, :inner]).sigmoid().chunk(2, 1)
    q = wh[:, inner:] if weights.bias_hn is None else wh[:, inner:] + weights.bias_hn
    n = norm.sums(t, gates[:, inner:] + r * q, inner).tanh()
    return (n + z * (h - n),)


def _ligru(t: int, gates: Tensor, state: State, weights: Weights, norm: "StepNorm") -> State:
    """h_t = z h_{t−1} + (1−z) ReLU(a_n), gate order z, n (Ravanelli et al. 2018)."""
    (h,) = state
    z, n = norm.sums(t, gates + norm.recurrent(t, h @ weights.w_hh.t())).chunk(2, 1)
    n = n.relu()
    return (n + z.sigmoid() * (h - n),)


STEPS = {"RNN_TANH": _rnn(torch.tanh), "RNN_RELU": _rnn(torch.relu), "LSTM": _lstm, "GRU": _gru}
STEPS["LIGRU"] = _ligru
"""One time step of each cell: (t, gate inputs, state, weights, norm) -> state."""


class StepNorm:
    """What a normalisation does before the loop, and inside it to one direction: here nothing."""

    KINDS: ClassVar[dict[str, type["StepNorm"]]] = {}

    def __init__(self, spec: Spec, steps: Steps, tensors: Tensors, d: int):
        self.spec, self.steps, self.tensors, self.d = spec, steps, tensors, d

    @staticmethod
    def before(
        spec: Spec,  # noqa: ARG004
        steps: Steps,  # noqa: ARG004
        tensors: Tensors,
        pre: Tensor,
    ) -> tuple[Tensor, Statistics | None]:
        """Map all gate inputs (N, D·C); also return what was measured."""
        return (pre if tensors.bias is None else pre + tensors.bias), None

    def gates(self, own: Tensor) -> Tensor:
        """Map this direction's gate inputs (N, C), after ``before``."""
        return own

    def recurrent(self, t: int, wh: Tensor) -> Tensor:  # noqa: ARG002
        """Map W_h h, (n, C)."""
        return wh

    def sums(self, t: int, sums: Tensor, first: int = 0) -> Tensor:  # noqa: ARG002
        """Map W_x x + W_h h, (n, C′): the channels from ``first`` on."""
        return sums

    def cell(self, t: int, c: Tensor) -> Tensor:  # noqa: ARG002
        """Map the LSTM's c before tanh, (n, H)."""
        return c

    def measured(self) -> Statistics | None:
        return None

    def own(self, value: Tensor | None, first: int, width: int) -> Any:
        """Return this direction's entries of a vector (D·C,), from ``first`` on."""
        if value is None:
            return None
        start = self.d * (value.shape[-1] // len(self.spec.reverse)) + first
        return value[..., start : start + width]


class _InputNorm(StepNorm):
    @staticmethod
    def before(
        spec: Spec, steps: Steps, tensors: Tensors, pre: Tensor
    ) -> tuple[Tensor, Statistics | None]:
        norm = Norm(*spec[2:], *tensors.norm)
        return normalise_input(norm, steps, pre, directions=len(spec.reverse))


class _RowsOfStep(StepNorm):
    """Base of what is normalised over the rows of a step."""

    def __init__(self, spec: Spec, steps: Steps, tensors: Tensors, d: int):
        super().__init__(spec, steps, tensors, d)
        self.seen: dict[int, list[Statistics]] = {}

    @staticmethod
    def before(
        spec: Spec,  # noqa: ARG004
        steps: Steps,  # noqa: ARG004
        tensors: Tensors,  # noqa: ARG004
        pre: Tensor,
    ) -> tuple[Tensor, Statistics | None]:
        return pre, None

    def given(self, first: int, width: int, slots: slice = slice(None)) -> Any:
        """Return the given statistics, if any, of channels of this direction."""
        if self.tensors.mean is None:
            return None
        both = (self.own(v, first, width) for v in (self.tensors.mean, self.tensors.var))
        return tuple(value[slots] if len(value) > 1 else value for value in both)

    def normalised(
        self, t: int, rows: Tensor, weight: Tensor | None, bias: Tensor | None, first: int
    ) -> Tensor:
        """Normalise rows (n, C′) of step t; ``first`` is the first channel of their statistics."""
        out, measured = normalise(
            rows,
            weight,
            bias,
            Groups.sequence(self.steps.at(t)),
            eps=self.spec.eps,
            given=self.given(first, rows.shape[1], slice(t, t + 1)),
            batch=self.spec.batch,
        )
        if measured is not None:
            self.seen.setdefault(t, []).append(measured)
        return out

    def measured(self) -> Statistics | None:
        if not self.seen:
            return None
        steps = [_joined(self.seen[t]) for t in range(self.steps.time)]
        return Statistics(*(torch.cat(parts) for parts in zip(*steps, strict=True)))


class _SumsNorm(_RowsOfStep):
    def sums(self, t: int, sums: Tensor, first: int = 0) -> Tensor:
        width, (weight, bias, *_) = sums.shape[1], self.tensors.norm
        return self.normalised(
            t, sums, self.own(weight, first, width), self.own(bias, first, width), first
        )


class _RecurrentNorm(_RowsOfStep):
    def gates(self, own: Tensor) -> Tensor:
        tensors, C = self.tensors, own.shape[1]
        weight, bias = self.own(tensors.weight, 0, C), self.own(tensors.bias, 0, C)
        mean, var = self.given(0, C) or (None, None)
        norm = Norm("input", self.spec.eps, True, self.spec.batch, False, weight, bias)
        out, self.of_input = normalise_input(norm._replace(mean=mean, var=var), self.steps, own)
        return out

    def recurrent(self, t: int, wh: Tensor) -> Tensor:
        C = wh.shape[1]
        return self.normalised(t, wh, self.own(self.tensors.gamma_hh, 0, C), None, C)

    def cell(self, t: int, c: Tensor) -> Tensor:
        if not self.spec.cell:
            return c
        H, tensors = c.shape[1], self.tensors
        weight, bias = self.own(tensors.weight_c, 0, H), self.own(tensors.bias_c, 0, H)
        return self.normalised(t, c, weight, bias, 2 * 4 * H)  # after those of W_x x and W_h h

    def measured(self) -> Statistics | None:
        inside = super().measured()
        return None if inside is None else _joined([self.of_input, inside])


class RowNorm(StepNorm):
    """Layer or RMS normalisation: of W_x x before the loop, of W_h h and c inside it."""

    @staticmethod
    def before(
        spec: Spec,
        steps: Steps,  # noqa: ARG004
        tensors: Tensors,
        pre: Tensor,
    ) -> tuple[Tensor, Statistics | None]:
        rows = pre.unflatten(1, (len(spec.reverse), -1))
        out = _standardised(rows, spec).flatten(1)
        return _affine(out, tensors.weight, tensors.bias).to(pre.dtype), None

    def recurrent(self, t: int, wh: Tensor) -> Tensor:  # noqa: ARG002
        weight = self.own(self.tensors.gamma_hh, 0, wh.shape[1])
        return _affine(_standardised(wh, self.spec), weight, None).to(wh.dtype)

    def cell(self, t: int, c: Tensor) -> Tensor:  # noqa: ARG002
        if not self.spec.cell:
            return c
        H, tensors = c.shape[1], self.tensors
        weight, bias = self.own(tensors.weight_c, 0, H), self.own(tensors.bias_c, 0, H)
        return _affine(_standardised(c, self.spec), weight, bias).to(c.dtype)


StepNorm.KINDS |= {
    "none": StepNorm,
    "input": _InputNorm,
    "step": _SumsNorm,
    "row": RowNorm,
    "recurrent": _RecurrentNorm,
    "rms": RowNorm,
}


def _standardised(rows: Tensor, spec: Spec) -> Tensor:
    """Scale to mean 0 and variance 1 over the last dimension, in float32 or wider; with "rms" to
    a mean square of 1."""
    rows, eps = rows.to(wide(rows.dtype)), spec.eps
    if spec.kind == "rms":
        return rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    if torch.jit.is_tracing():  # ONNX needs the size as a number: strides are, traced sizes not
        rows = rows.contiguous()
        return F.layer_norm(rows, rows.stride()[-2:-1], eps=eps)
    return F.layer_norm(rows, rows.shape[-1:], eps=eps)


def _affine(rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    rows = rows if weight is None else rows * weight
    return rows if bias is None else rows + bias


def _joined(parts: Sequence[Any]) -> Any:
    """Join statistics of neighbouring channels; None if there are none."""
    if parts[0] is None:
        return None
    mean, var = (torch.cat([part[k] for part in parts], 1) for k in (0, 1))
    return Statistics(mean, var, parts[0].count)
