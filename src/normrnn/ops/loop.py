"""The recurrence in torch's own operations: one time loop for all cells, directions and norms.

A pure function that autograd differentiates, any number of times, on any device and in any type.
On a GPU every operation of a step is a kernel launch: there are few of them, and none waits for
the device or copies from the host, so that a CUDA graph can capture the loop.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.ops.call import Norm, Result, Spec, State, Tensors, Weights, check_given
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
    reverse, weights = spec.reverse[norm.d], transposed(tensors.weights(norm.d))
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
        elif later < len(resets) and reset_to is not None:
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


def transposed(weights: Weights) -> Weights:
    """Return the weights as :data:`STEPS` take them: W_h (H, C) and W_hr (H, P)."""
    w_hr = None if weights.w_hr is None else weights.w_hr.t()
    return weights._replace(w_hh=weights.w_hh.t(), w_hr=w_hr)


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
        return (phi(norm.preactivation(t, gates, h, weights.w_hh)),)

    return step


def _lstm(t: int, gates: Tensor, state: State, weights: Weights, norm: "StepNorm") -> State:
    """Paper, section 3.1; gate order i, f, g, o. Peephole terms come after any normalisation."""
    (h, c), (pi, pf, po, w_hr) = state, weights[3:7]
    sums = norm.preactivation(t, gates, h, weights.w_hh)
    i, f, g, o = sums.chunk(4, 1)
    if pi is None and pf is None and po is None:  # one operation for all gates
        i, f, _, o = sums.sigmoid().chunk(4, 1)
        c = torch.addcmul(i * g.tanh(), f, c)
    else:
        i = i if pi is None else torch.addcmul(i, pi, c)
        f = f if pf is None else torch.addcmul(f, pf, c)
        c = torch.addcmul(i.sigmoid() * g.tanh(), f.sigmoid(), c)
        o = (o if po is None else torch.addcmul(o, po, c)).sigmoid()
    h = o * norm.cell(t, c).tanh()
    return (h if w_hr is None else h @ w_hr), c


def _gru(t: int, gates: Tensor, state: State, weights: Weights, norm: "StepNorm") -> State:
    """h_t = (1−z) n + z h_{t−1}, n = tanh(a_n + r (W_hn h_{t−1} + b_hn)), as in torch."""
    (h,) = state
    sizes = 2 * h.shape[1], h.shape[1]
    (a, a_n), (wh, q) = gates.split(sizes, 1), norm.product(t, h, weights.w_hh).split(sizes, 1)
    r, z = norm.sums(t, a + wh).sigmoid().chunk(2, 1)
    q = q if weights.bias_hn is None else q + weights.bias_hn
    n = norm.sums(t, torch.addcmul(a_n, r, q), sizes[0]).tanh()
    return (torch.lerp(n, h, z),)


def _ligru(t: int, gates: Tensor, state: State, weights: Weights, norm: "StepNorm") -> State:
    """h_t = z h_{t−1} + (1−z) ReLU(a_n), gate order z, n (Ravanelli et al. 2018)."""
    (h,) = state
    z, n = norm.preactivation(t, gates, h, weights.w_hh).chunk(2, 1)
    return (torch.lerp(n.relu(), h, z.sigmoid()),)


STEPS = {"RNN_TANH": _rnn(torch.tanh), "RNN_RELU": _rnn(torch.relu), "LSTM": _lstm, "GRU": _gru}
STEPS["LIGRU"] = _ligru
"""A time step of each cell: (t, gate inputs, state, :func:`transposed` weights, norm) -> state."""


class StepNorm:
    """What a normalisation does before the loop, and inside it to one direction: here nothing."""

    KINDS: ClassVar[dict[str, type["StepNorm"]]] = {}
    changes_product = False
    """Whether :meth:`recurrent` does anything."""

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

    def product(self, t: int, h: Tensor, w: Tensor) -> Tensor:
        """Return W_h h (n, C), mapped."""
        return self.recurrent(t, h @ w)

    def preactivation(self, t: int, gates: Tensor, h: Tensor, w: Tensor) -> Tensor:
        """Return gates + W_h h (n, C), mapped."""
        if self.changes_product:
            return self.sums(t, gates + self.product(t, h, w))
        return self.sums(t, torch.addmm(gates, h, w))

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


class StepAffine:
    """(x − mean) γ / √(var + ε) + β with given statistics, as one operation per step.

    Args:
        given: mean and variance, (K, C′) each, K = 1 or T.
    """

    def __init__(self, given: Any, gamma: Tensor | None, beta: Tensor | None, eps: float):
        copy = torch.is_grad_enabled()  # running statistics change before the backward pass
        mean, var = (value.to(wide(value.dtype), copy=copy) for value in given)
        scale = (var + eps).rsqrt()
        scale = scale if gamma is None else scale * gamma
        shift = -mean * scale if beta is None else beta - mean * scale
        self.scale, self.shift = scale.unbind(), shift.unbind()

    def __call__(self, t: int, rows: Tensor) -> Tensor:
        t = t if len(self.scale) > 1 else 0
        return torch.addcmul(self.shift[t], rows, self.scale[t])


class _StepBatchNorm:
    """Batch normalisation of neighbouring channels over the rows of each step.

    Args:
        first: of their statistics; γ and β begin at ``parameter``.
    """

    def __init__(
        self,
        norm: "_RowsOfStep",
        width: int,
        gamma: Tensor | None,
        beta: Tensor | None,
        first: int,
        parameter: int = 0,
    ):
        self.spec, self.dtype, tensors = norm.spec, wide(norm.tensors.w_hh.dtype), norm.tensors
        vectors = (norm.own(v, parameter, width) for v in (gamma, beta))
        self.gamma, self.beta = (None if v is None else v.to(self.dtype) for v in vectors)
        self.given = None
        if tensors.mean is not None and norm.needs_given:
            both = [norm.own(v, first, width).to(self.dtype) for v in (tensors.mean, tensors.var)]
            self.given = StepAffine(both, self.gamma, self.beta, self.spec.eps)
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}
        """Mean and 1 / √(var + ε) of each step."""

    def __call__(self, t: int, rows: Tensor) -> Tensor:
        values, eps = rows.to(self.dtype), self.spec.eps
        if not self.spec.batch or rows.shape[0] == 1:  # a single row has no variance
            assert self.given is not None
            if self.spec.batch:
                row = values[0].detach()
                self.seen[t] = row, torch.full_like(row, eps).rsqrt()
            return self.given(t, values).to(rows.dtype)
        out, *found = torch.native_batch_norm(
            values, self.gamma, self.beta, None, None, True, 0.0, eps
        )
        self.seen[t] = found[0], found[1]
        return out.to(rows.dtype)

    def statistics(self) -> Any:
        """Return means and variances (T, C′) of all steps."""
        means, scales = zip(*(self.seen[t] for t in range(len(self.seen))), strict=True)
        var = torch.stack(scales).square().reciprocal() - self.spec.eps
        return torch.stack(means).detach(), var.clamp(min=0).detach()


class _RowsOfStep(StepNorm):
    """Base of what is normalised over the rows of a step."""

    def __init__(self, spec: Spec, steps: Steps, tensors: Tensors, d: int):
        super().__init__(spec, steps, tensors, d)
        self.needs_given = not spec.batch or steps.has_single_row(True)

    @staticmethod
    def before(
        spec: Spec,  # noqa: ARG004
        steps: Steps,  # noqa: ARG004
        tensors: Tensors,  # noqa: ARG004
        pre: Tensor,
    ) -> tuple[Tensor, Statistics | None]:
        return pre, None

    def joined(self, parts: Sequence["_StepBatchNorm"]) -> Statistics | None:
        """Return the statistics of neighbouring channels."""
        if not self.spec.batch:
            return None
        pairs = zip(*(part.statistics() for part in parts), strict=True)
        mean, var = (torch.cat(values, 1) for values in pairs)
        return Statistics(mean, var, self.steps.counts(True, mean.device).to(mean.dtype))


class _SumsNorm(_RowsOfStep):
    def __init__(self, spec: Spec, steps: Steps, tensors: Tensors, d: int):
        super().__init__(spec, steps, tensors, d)
        self.parts: dict[int, _StepBatchNorm] = {}

    def sums(self, t: int, sums: Tensor, first: int = 0) -> Tensor:
        if first not in self.parts:  # the GRU normalises its candidate after the other gates
            weight, bias, *_ = self.tensors.norm
            self.parts[first] = _StepBatchNorm(self, sums.shape[1], weight, bias, first, first)
        return self.parts[first](t, sums)

    def measured(self) -> Statistics | None:
        return self.joined(list(self.parts.values()))


class _RecurrentNorm(_RowsOfStep):
    changes_product = True

    def __init__(self, spec: Spec, steps: Steps, tensors: Tensors, d: int):
        super().__init__(spec, steps, tensors, d)
        C, H = tensors.w_hh.shape[0], tensors.weights(d).state_sizes[1]
        self.parts = [_StepBatchNorm(self, C, tensors.gamma_hh, None, C)]
        if spec.cell:
            vectors = tensors.weight_c, tensors.bias_c
            self.parts.append(_StepBatchNorm(self, H, *vectors, 2 * C))

    def gates(self, own: Tensor) -> Tensor:
        tensors, C = self.tensors, own.shape[1]
        weight, bias, mean, var = (
            self.own(v, 0, C) for v in (tensors.weight, tensors.bias, tensors.mean, tensors.var)
        )
        norm = Norm("input", self.spec.eps, True, self.spec.batch, False, weight, bias)
        out, self.of_input = normalise_input(norm._replace(mean=mean, var=var), self.steps, own)
        return out

    def recurrent(self, t: int, wh: Tensor) -> Tensor:
        return self.parts[0](t, wh)

    def cell(self, t: int, c: Tensor) -> Tensor:
        return self.parts[1](t, c) if self.spec.cell else c

    def measured(self) -> Statistics | None:
        inside = self.joined(self.parts)
        return None if inside is None else _joined([self.of_input, inside])


class RowNorm(StepNorm):
    """Layer or RMS normalisation: of W_x x before the loop, of W_h h and c inside it."""

    changes_product = True

    def __init__(self, spec: Spec, steps: Steps, tensors: Tensors, d: int):
        super().__init__(spec, steps, tensors, d)
        C, H = tensors.w_hh.shape[0], tensors.weights(d).state_sizes[1]
        dtype, vectors = wide(tensors.w_hh.dtype), (tensors.weight_c, tensors.bias_c)
        own = [self.own(tensors.gamma_hh, 0, C), *(self.own(v, 0, H) for v in vectors)]
        self.gamma_hh, self.weight_c, self.bias_c = (
            None if v is None else v.to(dtype) for v in own
        )

    @staticmethod
    def before(
        spec: Spec,
        steps: Steps,  # noqa: ARG004
        tensors: Tensors,
        pre: Tensor,
    ) -> tuple[Tensor, Statistics | None]:
        out = _row_norm(pre.unflatten(1, (len(spec.reverse), -1)), None, None, spec)
        out = out if tensors.weight is None else out * tensors.weight.view(out.shape[1:])
        out = out if tensors.bias is None else out + tensors.bias.view(out.shape[1:])
        return out.flatten(1).to(pre.dtype), None

    def recurrent(self, t: int, wh: Tensor) -> Tensor:  # noqa: ARG002
        return _row_norm(wh, self.gamma_hh, None, self.spec).to(wh.dtype)

    def cell(self, t: int, c: Tensor) -> Tensor:  # noqa: ARG002
        if not self.spec.cell:
            return c
        return _row_norm(c, self.weight_c, self.bias_c, self.spec).to(c.dtype)


StepNorm.KINDS |= {
    "none": StepNorm,
    "input": _InputNorm,
    "step": _SumsNorm,
    "row": RowNorm,
    "recurrent": _RecurrentNorm,
    "rms": RowNorm,
}


def _row_norm(rows: Tensor, weight: Tensor | None, bias: Tensor | None, spec: Spec) -> Tensor:
    """Layer or RMS normalisation over the last dimension, in float32 or wider."""
    rows, eps = rows.to(wide(rows.dtype)), spec.eps
    if spec.kind == "rms":
        out = rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
        out = out if weight is None else out * weight
        return out if bias is None else out + bias
    if torch.jit.is_tracing():  # ONNX needs the size as a number: strides are, traced sizes not
        rows = rows.contiguous()
        return F.layer_norm(rows, rows.stride()[-2:-1], weight, bias, eps)
    return F.layer_norm(rows, rows.shape[-1:], weight, bias, eps)


def _joined(parts: Sequence[Any]) -> Any:
    """Join statistics of neighbouring channels; None if there are none."""
    if parts[0] is None:
        return None
    mean, var = (torch.cat([part[k] for part in parts], 1) for k in (0, 1))
    return Statistics(mean, var, parts[0].count)
