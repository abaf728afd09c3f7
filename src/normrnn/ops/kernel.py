"""The compiled recurrence: a layer's directions, projection and normalisation included, in C.

It serves float32 on a CPU and is compiled when it is first wanted (:mod:`normrnn.ops.library`).
Everything else, and being differentiated twice, is for :mod:`normrnn.ops.loop`, which computes
the same. ``NORMRNN_NATIVE=0`` switches it off.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from normrnn.ops.call import (
    GATES,
    Call,
    Cell,
    InputNorm,
    Inputs,
    Peephole,
    Plain,
    Plug,
    Result,
    RowNorm,
    StepNorm,
)
from normrnn.ops.library import Library, describe, floats, library, room
from normrnn.ops.loop import loop
from normrnn.ops.normalise import LONE, Fixed
from normrnn.ops.statistics import Statistics, synchronised
from normrnn.ops.steps import Steps

__all__ = ["describe", "prefers", "run", "serves", "update"]

_MODES = {"RNN_TANH": 0, "RNN_RELU": 1, "LSTM": 2, "GRU": 3}
# What is normalised before the loop and inside a step, as `kernels/job.h` counts them.
_KINDS = {Plain: (0, 0), InputNorm: (1, 0), StepNorm: (0, 1), RowNorm: (2, 2)}
_COLUMNS, _FEATURES = 1, 2
_OVER_ROWS, _OVER_FEATURES = 1, 2
_SPLIT_UNITS, _SPLIT_ROWS = 0, 1
_UNIT_SUMS = 6
_BIAS_HN, _WEIGHT_C, _BIAS_C = 3, 4, 5
_VECTORS: tuple[str, ...] = ("weight", "bias", "weight_hh", "weight_c", "bias_c")
"""Parameters that a plug may have."""
_FIRST_CELL, _OF_A_CELL = 3 + len(_VECTORS), 6
"""Where the parameters of the directions begin in the flat order, and how many each has."""


_TENSORS = {Tensor, torch.nn.Parameter}


class _Direction(NamedTuple):
    """Addresses, as `Direction` of `kernels/job.h`."""

    reverse: int = 0
    w_ih: int = 0
    w_hh: int = 0
    gamma: int = 0
    beta: int = 0
    gamma_hh: int = 0
    gamma_c: int = 0
    beta_c: int = 0
    bias_hn: int = 0
    peephole_i: int = 0
    peephole_f: int = 0
    peephole_o: int = 0
    h0: int = 0
    c0: int = 0
    fixed_mean: int = 0
    fixed_var: int = 0
    stat_mean: int = 0
    stat_var: int = 0
    out: int = 0
    hn: int = 0
    cn: int = 0
    pre: int = 0
    mean: int = 0
    scale: int = 0
    shift: int = 0
    gamma_h: int = 0
    row_mean: int = 0
    row_scale: int = 0
    used_mean: int = 0
    used_inv: int = 0
    trace: int = 0
    hat: int = 0
    inv: int = 0
    dout: int = 0
    dhn: int = 0
    dcn: int = 0
    dx: int = 0
    dp: int = 0
    d_w_ih: int = 0
    d_w_hh: int = 0
    d_gamma: int = 0
    d_beta: int = 0
    d_gamma_hh: int = 0
    d_units: int = 0
    dh0: int = 0
    dc0: int = 0
    level: int = 0
    slope: int = 0


class _Job(NamedTuple):
    """`Job` of `kernels/job.h` without its directions."""

    T: int
    B: int
    N: int
    H: int
    I: int  # noqa: E741
    D: int
    threads: int
    mode: int
    outer: int
    inner: int
    split: int
    ldi: int
    ldx: int
    ldo: int
    ldc: int
    per_step: int
    batch: int
    fixed_per_step: int
    keep: int
    eps: float
    sizes: int
    offsets: int
    resets: int = 0
    x: int = 0
    dx_in: int = 0


_LAYOUT = struct.Struct(f"{_Job._fields.index('eps')}qd5q{2 * len(_Direction._fields)}q")


def serves(call: Call, inputs: Inputs, plug: Plug) -> bool:
    """Whether the kernel takes this call: float32 on a CPU, real memory, nobody tracing."""
    if not call.steps.rows:
        return False
    if type(plug) not in _KINDS or library() is None or _is_traced():
        return False
    if isinstance(plug, InputNorm) and plug.batch and synchronised(plug.sync):
        return False  # the ranks meet between the statistics and the loop
    every = (*_flat(inputs, plug), *(getattr(plug, "fixed", None) or ()))
    return all(_is_real(tensor) for tensor in every if tensor is not None)


def prefers(time: int, batch: int, hidden: int) -> bool:
    """Whether it is the faster way to train on a dense batch without a norm.

    A rule, not a measurement, so that the same program always computes the same bits. torch's is
    as fast for tiny calls, and for many rows of few units, where activations cost most.
    """
    worth = time * hidden >= 1000 and not (batch >= 96 and hidden <= 128)
    return worth and library() is not None and not _is_traced()


def _is_traced() -> bool:
    """Whether somebody wants to see operations of torch, not numbers."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
    )


def _is_real(tensor: Tensor) -> bool:
    """Whether its address can be handed to C: float32 on the CPU, and no stand-in for a tensor."""
    return (
        type(tensor) in _TENSORS
        and tensor.dtype == torch.float32
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and torch._C._has_storage(tensor)
        and not tensor.is_neg()
        and 0 not in tensor.shape
    )


def run(call: Call, inputs: Inputs, plug: Plug) -> Result:
    """As :func:`normrnn.ops.recurrence.layer`; ask ``serves`` first."""
    keep = torch.is_grad_enabled()
    bare = replace(plug, **dict.fromkeys(_vectors_of(plug)))
    if isinstance(bare, InputNorm | StepNorm):
        bare = replace(bare, fixed=_used(call.steps, bare, keep))
    rows, *rest = _Layer.apply(call, bare, keep, *_flat(inputs, plug))  # type: ignore
    parts = 2 if call.mode == "LSTM" else 1
    measured = rest[parts:]
    if measured:
        measured.append(_counts(call.steps, len(measured[0])))
    return Result(rows, tuple(rest[:parts]), Statistics(*measured) if measured else None)


def _used(steps: Steps, plug: InputNorm | StepNorm, keep: bool) -> Fixed | None:
    """The given statistics, where they are needed at all; a copy if there may be a way back, since
    running ones change before it."""
    by_step = isinstance(plug, StepNorm) or plug.per_step
    if plug.batch and (steps.sizes[-1] if by_step else steps.rows) > 1:
        return None
    if plug.fixed is None:
        raise ValueError(LONE)
    mean, var = (value.clone() if keep else value for value in plug.fixed)
    return mean.contiguous(), var.contiguous()


def update(mean: Tensor, var: Tensor, batch: Statistics, share: float) -> bool | None:
    """One update of buffers (C,) from K groups: whether all was finite; None if C cannot."""
    loaded = library()
    tensors = mean, var, *batch
    if loaded is None or _is_traced() or not all(map(_is_real, tensors)):
        return None
    K, C = batch.mean.shape
    if not all(t.is_contiguous() and t.shape == (C,) for t in (mean, var)):
        return None
    if batch.mean.stride(1) != 1 or batch.mean.stride() != batch.var.stride():
        return None
    if not batch.count.is_contiguous():
        return None
    addresses = [t.data_ptr() for t in (batch.count, batch.mean, batch.var)]
    running = mean.data_ptr(), var.data_ptr()
    return bool(loaded.update(K, C, batch.mean.stride(0), *addresses, share, *running))


def _vectors_of(plug: Plug) -> list[str]:
    return [field.name for field in fields(plug) if field.name in _VECTORS]


def _flat(inputs: Inputs, plug: Plug) -> list[Tensor | None]:
    """Every tensor that may want a gradient, in one order."""
    h0, c0 = (*(inputs.state or ()), None, None)[:2]
    flat = [inputs.x, h0, c0, *(getattr(plug, name, None) for name in _VECTORS)]
    for d, cell in enumerate(inputs.cells):
        flat += [inputs.w_ih[d] if inputs.w_ih else None, cell.w_hh, cell.bias_hn, *cell.peephole]
    return flat


def _rebuilt(flat: Sequence[Any], plug: Plug) -> tuple[Inputs, Plug]:
    """The other way round; ``plug`` has what is no parameter."""
    x, h0, c0 = flat[:3]
    own: dict[str, Any] = dict(zip(_VECTORS, flat[3:_FIRST_CELL], strict=True))
    plug = replace(plug, **{name: own[name] for name in _vectors_of(plug)})
    w_ih, cells = [], []
    for first in range(_FIRST_CELL, len(flat), _OF_A_CELL):
        weight, w_hh, bias_hn, *peephole = flat[first : first + _OF_A_CELL]
        w_ih += [] if weight is None else [weight]
        cells.append(Cell(w_hh, bias_hn, Peephole(*peephole)))
    state = None if h0 is None else (h0,) if c0 is None else (h0, c0)
    return Inputs(x, cells, state, w_ih), plug


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, plug: Any, keep: bool, *flat: Tensor | None
    ) -> tuple[Tensor, ...]:
        solid: list[Any] = [None if t is None else t.contiguous() for t in flat]
        plan = _Plan.of(call, plug, solid, keep=keep and any(ctx.needs_input_grad))
        kept = _allocate(plan)
        plan.library.forward(plan.packed(plan.job, _directions(plan, solid, kept)))
        outputs: list[Any] = (
            [kept.out, kept.hn] if kept.cn is None else [kept.out, kept.hn, kept.cn]
        )
        if plan.job.keep:
            if plan.job.outer == 0:
                kept = kept._replace(pre=None)
            ctx.save_for_backward(*flat, kept.out)
            ctx.plan, ctx.kept = plan, kept._replace(out=None, hn=None, cn=None)
            ctx.set_materialize_grads(False)
        if kept.statistics is not None:
            measured = list(kept.statistics)
            ctx.mark_non_differentiable(*measured)
            outputs += measured
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *flat, out = ctx.saved_tensors
        first = len(ctx.needs_input_grad) - len(flat)
        wanted = ctx.needs_input_grad[first:]
        again, real = torch.is_grad_enabled(), all(_is_real(g) for g in grads if g is not None)
        if again or not real or _is_traced():
            with torch.enable_grad():
                derived = _by_loop(ctx.plan, flat, grads, wanted, again)
        else:
            derived = _backward(ctx.plan, ctx.kept._replace(out=out), flat, grads, wanted)
        return *[None] * first, *derived


def _by_loop(
    plan: "_Plan",
    flat: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    wanted: Sequence[bool],
    again: bool,
) -> list[Tensor | None]:
    """The same gradients in torch's operations, to be differentiated ``again`` or traced."""
    # Views, so that an input that depends on another one counts for itself alone.
    seen = [None if t is None else t.view_as(t) for t in flat]
    result = loop(plan.call, *_rebuilt(seen, plan.plug))
    pairs = zip((result.rows, *result.state), grads, strict=False)
    given = [(output, grad) for output, grad in pairs if grad is not None]
    derived: list[Tensor | None] = [None] * len(flat)
    if given:
        outputs, heads = zip(*given, strict=True)
        which = [k for k, want in enumerate(wanted) if want]
        sources: Any = [seen[k] for k in which]
        found = torch.autograd.grad(outputs, sources, heads, create_graph=again, allow_unused=True)
        for k, grad in zip(which, found, strict=True):
            derived[k] = grad
    return derived


@dataclass(frozen=True)
class _Plan:
    """What is computed, and its sizes."""

    library: Library
    call: Call
    plug: Any
    job: _Job
    C: int
    width: int
    """Floats of a packed row of gates."""
    vectors: int
    """Of units, ``library.vector`` floats each."""
    traced: int
    """Vectors kept of a row and vector of units."""
    groups: int
    """That have statistics of their own."""
    layout: tuple[Tensor, Tensor]
    """Sizes and offsets of the steps, whose addresses the job has."""

    @staticmethod
    def of(call: Call, plug: Any, flat: Sequence[Any], keep: bool) -> "_Plan":
        loaded = library()
        assert loaded is not None, "ask serves() first"
        steps, D, mode = call.steps, len(call.reverse), _MODES[call.mode]
        w_ih, w_hh = flat[_FIRST_CELL : _FIRST_CELL + 2]
        H = w_hh.shape[1]
        C, (width, vectors) = GATES[call.mode] * H, loaded.widths(mode, H)
        outer, inner = _KINDS[type(plug)]
        batch, fixed = bool(getattr(plug, "batch", False)), cast(Any, getattr(plug, "fixed", None))
        per_step = bool(getattr(plug, "per_step", False))
        if outer == _COLUMNS and not batch:  # given and shared over time, they need no groups
            per_step = len(fixed[0]) > 1
        threads = torch.get_num_threads()
        layout = _layout_of(steps)
        job = _Job(
            T=len(steps),
            B=steps.batch,
            N=steps.rows,
            H=H,
            I=0 if w_ih is None else w_ih.shape[1],
            D=D,
            threads=threads,
            mode=mode,
            outer=outer,
            inner=inner,
            split=_split(threads, D, steps.batch, H, inner),
            ldi=flat[0].shape[1],
            ldx=_apart(D * width),
            ldo=D * H,
            ldc=D * C,
            per_step=per_step,
            batch=batch,
            fixed_per_step=fixed is not None and len(fixed[0]) > 1,
            keep=keep,
            eps=getattr(plug, "eps", 0.0),
            sizes=layout[0].data_ptr(),
            offsets=layout[1].data_ptr(),
            resets=0 if call.resets is None else call.resets.data_ptr(),
            x=flat[0].data_ptr(),
        )
        traced = (1, 1, 7 if getattr(plug, "cell", False) else 6, 5)[mode]
        groups = len(steps) if per_step or inner == _OVER_ROWS else 1
        return _Plan(loaded, call, plug, job, C, width, vectors, traced, groups, layout)

    def packed(self, job: _Job, directions: Sequence[_Direction]) -> bytes:
        return _LAYOUT.pack(*job, *directions[0], *directions[-1])


class _Kept(NamedTuple):
    """Buffers of the way there, the last eight for the way back; None where not needed."""

    out: Tensor | None
    hn: Tensor | None
    cn: Tensor | None
    statistics: Tensor | None
    unit: Tensor | None
    pre: Tensor | None
    read: Tensor | None
    rows: Tensor | None
    used: Tensor | None
    trace: Tensor | None
    hat: Tensor | None
    inv: Tensor | None


def _allocate(plan: _Plan) -> _Kept:
    job, width = plan.job, plan.width
    D, T, B, N, H, VW = job.D, job.T, job.B, job.N, job.H, plan.library.vector
    units = D * N * plan.vectors * VW
    K = job.T if job.per_step else 1
    cell = bool(getattr(plan.plug, "cell", False))
    return _Kept(
        out=floats(N, D * H),
        hn=floats(D, B, H),
        cn=floats(D, B, H) if plan.call.mode == "LSTM" else None,
        statistics=floats(2, plan.groups, D * plan.C) if job.batch else None,
        unit=floats(D * H).fill_(1) if cell else None,
        pre=room(N * job.ldx + VW),
        read=floats(D, 2 * K + 2, width),
        rows=floats(D, 2, N) if job.outer == _FEATURES else None,
        used=floats(D, 2, T, width) if job.inner == _OVER_ROWS else None,
        trace=room(units * plan.traced) if job.keep or cell else None,
        hat=room(units * (plan.C // H)) if job.inner else None,
        inv=floats(D, 2, N) if job.inner == _OVER_FEATURES else None,
    )


def _at(tensor: Tensor | None, floats: int = 0) -> int:
    """The address of an entry; 0 of none."""
    return 0 if tensor is None else tensor.data_ptr() + 4 * floats


def _directions(plan: _Plan, flat: Sequence[Any], kept: _Kept) -> list[_Direction]:
    job, C, width = plan.job, plan.C, plan.width
    D, T, B, N, H = job.D, job.T, job.B, job.N, job.H
    _, h0, c0, weight, bias, weight_hh, weight_c, bias_c = flat[:_FIRST_CELL]
    if not getattr(plan.plug, "cell", False):
        weight_c = None  # having it is what normalises the cell
    elif weight_c is None:
        weight_c = kept.unit
    fixed_mean, fixed_var = getattr(plan.plug, "fixed", None) or (None, None)
    K, units = T if job.per_step else 1, N * plan.vectors * plan.library.vector
    directions = []
    for d, reverse in enumerate(plan.call.reverse):
        first, read = _FIRST_CELL + d * _OF_A_CELL, d * (2 * K + 2)
        w_ih, w_hh, bias_hn, *peephole = flat[first : first + _OF_A_CELL]
        directions.append(
            _Direction(
                reverse,
                _at(w_ih),
                _at(w_hh),
                _at(weight, d * C),
                _at(bias, d * C),
                _at(weight_hh, d * C),
                _at(weight_c, d * H),
                _at(bias_c, d * H),
                _at(bias_hn),
                *map(_at, peephole),
                h0=_at(h0, d * B * H),
                c0=_at(c0, d * B * H),
                fixed_mean=_at(fixed_mean, d * C),
                fixed_var=_at(fixed_var, d * C),
                stat_mean=_at(kept.statistics, d * C),
                stat_var=_at(kept.statistics, (plan.groups * D + d) * C),
                out=_at(kept.out, d * H),
                hn=_at(kept.hn, d * B * H),
                cn=_at(kept.cn, d * B * H),
                pre=_at(kept.pre, d * width),
                mean=_at(kept.read, read * width),
                scale=_at(kept.read, (read + K) * width),
                shift=_at(kept.read, (read + 2 * K) * width),
                gamma_h=_at(kept.read, (read + 2 * K + 1) * width),
                row_mean=_at(kept.rows, 2 * d * N),
                row_scale=_at(kept.rows, (2 * d + 1) * N),
                used_mean=_at(kept.used, 2 * d * T * width),
                used_inv=_at(kept.used, (2 * d + 1) * T * width),
                trace=_at(kept.trace, d * units * plan.traced),
                hat=_at(kept.hat, d * units * (C // H)),
                inv=_at(kept.inv, 2 * d * N),
            )
        )
    return directions


def _backward(
    plan: _Plan,
    kept: _Kept,
    flat: Sequence[Any],
    grads: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients in the flat order."""
    job, C, width = plan.job, plan.C, plan.width
    D, B, N, H = job.D, job.B, job.N, job.H
    solid: list[Any] = [None if t is None else t.contiguous() for t in flat]
    dout, dhn, dcn = (None if g is None else g.contiguous() for g in (*grads[:3], None)[:3])
    if plan.call.mode != "LSTM":
        dcn = None  # the third output is a statistic
    derived: list[Tensor | None] = [None] * len(flat)
    for k in (0, 1, 2):
        if wanted[k]:
            derived[k] = torch.empty_like(solid[k])
    dx = room(N * job.ldx + plan.library.vector)
    apart = job.inner == _OVER_FEATURES or plan.call.mode == "GRU"
    dp = room(N * job.ldx + plan.library.vector) if apart else dx
    vectors, units = floats(3, D * C), floats(_UNIT_SUMS, D, H)
    sums = floats(2, D, width)
    directions = []
    for d, direction in enumerate(_directions(plan, solid, kept)):
        first = _FIRST_CELL + d * _OF_A_CELL
        for k in (first, first + 1):
            derived[k] = torch.empty_like(solid[k]) if wanted[k] else None
        directions.append(
            direction._replace(
                dout=_at(dout, d * H),
                dhn=_at(dhn, d * B * H),
                dcn=_at(dcn, d * B * H),
                dx=_at(dx, d * width),
                dp=_at(dp, d * width),
                d_w_ih=_at(derived[first]),
                d_w_hh=_at(derived[first + 1]),
                d_gamma=_at(vectors, d * C),
                d_beta=_at(vectors, (D + d) * C),
                d_gamma_hh=_at(vectors, (2 * D + d) * C),
                d_units=_at(units, d * H),
                dh0=_at(derived[1], d * B * H),
                dc0=_at(derived[2], d * B * H),
                level=_at(sums, d * width),
                slope=_at(sums, (D + d) * width),
            )
        )
        for k, row in zip(range(first + 2, first + _OF_A_CELL), (_BIAS_HN, 0, 1, 2), strict=True):
            derived[k] = units[row, d] if wanted[k] else None
    threads = torch.get_num_threads()  # of autograd's thread
    job = job._replace(
        x=solid[0].data_ptr(),
        dx_in=_at(derived[0]),
        threads=threads,
        split=_split(threads, D, B, H, job.inner),
    )
    plan.library.backward(plan.packed(job, directions))
    found = (*vectors, units[_WEIGHT_C].flatten(), units[_BIAS_C].flatten())
    for k, grad in enumerate(found, 3):
        derived[k] = grad if wanted[k] else None
    return derived


def _split(threads: int, D: int, B: int, H: int, inner: int) -> int:
    """How the threads of a direction share its work. Rows need no waiting for each other, but
    every thread then reads all weights; over the features of a row nothing else will do."""
    if inner:
        return _SPLIT_ROWS if inner == _OVER_FEATURES else _SPLIT_UNITS
    team = -(-threads // D)
    return _SPLIT_ROWS if team > 1 and team <= B and H <= 200 else _SPLIT_UNITS


def _apart(floats: int) -> int:
    """As `apart` of `kernels/vector.h`: an odd number of cache lines."""
    return (-(-floats // 16) | 1) * 16


@lru_cache(maxsize=256)
def _layout_of(steps: Steps) -> tuple[Tensor, Tensor]:
    """Sizes and offsets of the steps, as C reads them."""
    sizes, offsets = (torch.tensor(v, device="cpu") for v in (steps.sizes, steps.offsets))
    return sizes, offsets


@lru_cache(maxsize=256)
def _counts(steps: Steps, groups: int) -> Tensor:
    """Rows of each group."""
    rows = steps.sizes if groups == len(steps) > 1 else [steps.rows]
    return torch.tensor(rows, dtype=torch.float32, device="cpu")
