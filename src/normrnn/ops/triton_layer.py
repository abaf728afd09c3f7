"""norm="layer" on LSTM as Triton kernels: ``torch.ops.normrnn.layer_lstm`` and its backward pass.

A program owns a block of sequences of one direction, all H units, and loops over time. The gate
inputs LN(W_x x; γ_x) + β are computed outside. A step adds LN(W_h h; γ_h) over 4H features.

Never run on a GPU by us: the kernels are tested in Triton's interpreter and compiled for sm_80 and
sm_90 (``python -m benchmarks.gpu``). The first call with a new size compares itself with
:mod:`normrnn.ops.loop` and raises if they differ.

Importing this module needs the package ``triton``. T time, B batch, N rows, D directions, H hidden.
Rows are the data of a ``PackedSequence``: frame t of sequence b is row ``offsets[t] + b``.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from normrnn.ops.call import Norm, Result, Spec, Tensors, Weights, describe_call
from normrnn.ops.fused import gate_inputs
from normrnn.ops.layout import Steps, Traced
from normrnn.ops.loop import initial_state, loop

MAX_HIDDEN = 256
TOLERANCE = 1e-4
"""Largest relative difference from the loop that :func:`self_check` accepts."""
SEQUENCES = 16
"""Sequences per program: the fewest rows that ``tl.dot`` multiplies."""

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether TRITON_INTERPRET=1 was set: the kernels then run on the CPU, slowly."""

_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_checked: set[tuple[Any, ...]] = set()


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _sum4(i, f, g, o):
    return tl.sum(i + f + g + o, 1)


@triton.jit
def _gates(base, row, mask, j, H: tl.constexpr):
    """The four gates of some rows, each (SEQUENCES, HP)."""
    at = base + row[:, None] * (tl.num_programs(1) * 4 * H) + tl.program_id(1) * 4 * H + j[None, :]
    i = tl.load(at, mask, 0.0)
    f = tl.load(at + H, mask, 0.0)
    g = tl.load(at + 2 * H, mask, 0.0)
    o = tl.load(at + 3 * H, mask, 0.0)
    return i, f, g, o


@triton.jit
def _store_gates(base, row, mask, j, i, f, g, o, H: tl.constexpr):
    at = base + row[:, None] * (tl.num_programs(1) * 4 * H) + tl.program_id(1) * 4 * H + j[None, :]
    tl.store(at, i, mask)
    tl.store(at + H, f, mask)
    tl.store(at + 2 * H, g, mask)
    tl.store(at + 3 * H, o, mask)


@triton.jit
def _vectors(base, j, H: tl.constexpr):
    """γ of the four gates, each (1, HP)."""
    at, mask = base + tl.program_id(1) * 4 * H + j[None, :], (j < H)[None, :]
    i = tl.load(at, mask, 0.0)
    f = tl.load(at + H, mask, 0.0)
    g = tl.load(at + 2 * H, mask, 0.0)
    o = tl.load(at + 3 * H, mask, 0.0)
    return i, f, g, o


@triton.jit
def _standardise_cell(c, inside, eps, H: tl.constexpr):
    """(c − mean) / σ over H, and 1 / σ."""
    centred = tl.where(inside, c - (tl.sum(c, 1) / H)[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / H + eps)[:, None]
    return centred * rstd, rstd


@triton.jit
def _is_reset(resets, offsets, t, reverse, b, length):
    """Whether the state restarts at frame t: backwards, the border is after the frame."""
    border = t + reverse
    return tl.load(resets + tl.load(offsets + border) + b, border < length, 0) != 0


@triton.jit
def _forward(
    gates,  # (N, D·4H)
    w_hh,  # (D, 4H, H)
    gamma,  # (D, 4H)
    weight_c,  # (D, H)
    bias_c,  # (D, H)
    c0,  # (D, B, H)
    resets,  # (N,) uint8
    lengths,  # (B,)
    offsets,  # (T + 1,)
    rows,  # out (N, D·H): h
    h,  # in and out (D, B, H): the state, kept here because tl.dot reads parts of it
    c_n,  # out (D, B, H)
    normed,  # out (N, D·4H): W_h h, standardised
    rstd,  # out (N, D): 1 / σ of W_h h
    h_before,  # out (N, D·H): h before every frame
    c_before,  # out (N, D·H)
    B,
    backwards,  # 1 if direction 0 runs backwards in time; direction 1 always does
    eps,
    H: tl.constexpr,
    HP: tl.constexpr,  # H, rounded up to a power of two
    BK: tl.constexpr,  # columns of W_h per product
    SEQUENCES: tl.constexpr,
    CELL_NORM: tl.constexpr,
    RESETS: tl.constexpr,
    KEEP: tl.constexpr,  # whether to write what the backward pass needs
    PRECISION: tl.constexpr,
):
    d, D = tl.program_id(1), tl.num_programs(1)
    reverse = tl.minimum(d + backwards, 1)
    b = tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)
    length = tl.load(lengths + b, b < B, 0)
    T = tl.load(lengths + tl.program_id(0) * SEQUENCES)  # the longest of the block
    j = tl.arange(0, HP)
    inside = (j < H)[None, :]
    gi, gf, gg, go = _vectors(gamma, j, H)
    first = (d * B + b).to(tl.int64)[:, None] * H
    in_batch = (b < B)[:, None] & inside
    c = tl.load(c0 + first + j[None, :], in_batch, 0.0)
    weights = w_hh + d * 4 * H * H + j[None, :] * H
    for s in range(T):
        t = tl.where(reverse == 1, T - 1 - s, s)
        alive = t < length
        mask = alive[:, None] & inside
        row = tl.load(offsets + t) + b
        carries = alive
        if RESETS:
            carries = alive & (_is_reset(resets, offsets, t, reverse, b, length) == 0)
            c = tl.where(alive[:, None] & (carries == 0)[:, None], 0.0, c)
        out = row[:, None] * (D * H) + d * H + j[None, :]
        if KEEP:
            before = tl.load(h + first + j[None, :], carries[:, None] & inside, 0.0)
            tl.store(h_before + out, before, mask)
            tl.store(c_before + out, c, mask)
        i = tl.zeros((SEQUENCES, HP), tl.float32)
        f = tl.zeros((SEQUENCES, HP), tl.float32)
        g = tl.zeros((SEQUENCES, HP), tl.float32)
        o = tl.zeros((SEQUENCES, HP), tl.float32)
        for start in range(0, H, BK):
            k = start + tl.arange(0, BK)
            part = tl.load(h + first + k[None, :], carries[:, None] & (k < H)[None, :], 0.0)
            part = part.to(w_hh.dtype.element_ty)
            at, there = weights + k[:, None], (k < H)[:, None] & inside
            i = tl.dot(part, tl.load(at, there, 0.0), i, input_precision=PRECISION)
            f = tl.dot(part, tl.load(at + H * H, there, 0.0), f, input_precision=PRECISION)
            g = tl.dot(part, tl.load(at + 2 * H * H, there, 0.0), g, input_precision=PRECISION)
            o = tl.dot(part, tl.load(at + 3 * H * H, there, 0.0), o, input_precision=PRECISION)
        mean = (_sum4(i, f, g, o) / (4 * H))[:, None]
        i = tl.where(inside, i - mean, 0.0)
        f = tl.where(inside, f - mean, 0.0)
        g = tl.where(inside, g - mean, 0.0)
        o = tl.where(inside, o - mean, 0.0)
        scale = tl.rsqrt(_sum4(i * i, f * f, g * g, o * o) / (4 * H) + eps)
        i, f, g, o = i * scale[:, None], f * scale[:, None], g * scale[:, None], o * scale[:, None]
        if KEEP:
            _store_gates(normed, row, mask, j, i, f, g, o, H)
            tl.store(rstd + row * D + d, scale, alive)
        xi, xf, xg, xo = _gates(gates, row, mask, j, H)
        new = tl.sigmoid(f * gf + xf) * c + tl.sigmoid(i * gi + xi) * _tanh(g * gg + xg)
        c = tl.where(mask, new, c)
        shown = c
        if CELL_NORM:
            shown, _ = _standardise_cell(c, inside, eps, H)
            vector = d * H + j[None, :]
            shown = shown * tl.load(weight_c + vector, inside, 0.0)
            shown += tl.load(bias_c + vector, inside, 0.0)
        new = tl.sigmoid(o * go + xo) * _tanh(shown)
        tl.store(rows + out, new, mask)
        tl.debug_barrier()  # all threads have read h
        tl.store(h + first + j[None, :], new, mask)
        tl.debug_barrier()  # all threads have written h
    tl.store(c_n + first + j[None, :], c, in_batch)


@triton.jit
def _backward(
    grad_rows,  # (N, D·H)
    gates,  # (N, D·4H)
    w_hh,  # (D, 4H, H)
    gamma,  # (D, 4H)
    weight_c,  # (D, H)
    bias_c,  # (D, H)
    resets,  # (N,) uint8
    lengths,  # (B,)
    offsets,  # (T + 1,)
    normed,  # (N, D·4H)
    rstd,  # (N, D)
    c_before,  # (N, D·H)
    dh_state,  # in and out (D, B, H): gradient of the final, then of the initial h
    dc_state,  # in and out (D, B, H)
    dgates,  # out (N, D·4H)
    dproduct,  # out (N, D·4H): gradient of W_h h
    dbias_c,  # out (N, D·H): gradient of what tanh reads, with CELL_NORM
    dweight_c,  # out (N, D·H): the same, times the standardised c
    B,
    backwards,
    eps,
    H: tl.constexpr,
    HP: tl.constexpr,
    BK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    CELL_NORM: tl.constexpr,
    RESETS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    d, D = tl.program_id(1), tl.num_programs(1)
    reverse = tl.minimum(d + backwards, 1)
    b = tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)
    length = tl.load(lengths + b, b < B, 0)
    T = tl.load(lengths + tl.program_id(0) * SEQUENCES)
    j = tl.arange(0, HP)
    inside = (j < H)[None, :]
    state = (d * B + b).to(tl.int64)[:, None] * H + j[None, :]
    in_batch = (b < B)[:, None] & inside
    dh = tl.load(dh_state + state, in_batch, 0.0)
    dc = tl.load(dc_state + state, in_batch, 0.0)
    for s in range(T):
        t = tl.where(reverse == 1, s, T - 1 - s)
        alive = t < length
        mask = alive[:, None] & inside
        row = tl.load(offsets + t) + b
        carries = alive
        if RESETS:
            carries = alive & (_is_reset(resets, offsets, t, reverse, b, length) == 0)
        out = row[:, None] * (D * H) + d * H + j[None, :]
        c = tl.load(c_before + out, mask, 0.0)
        zi, zf, zg, zo = _gates(normed, row, mask, j, H)
        i, f, g, o = _gates(gates, row, mask, j, H)
        gi, gf, gg, go = _vectors(gamma, j, H)
        i, f = tl.sigmoid(zi * gi + i), tl.sigmoid(zf * gf + f)
        g, o = _tanh(zg * gg + g), tl.sigmoid(zo * go + o)
        shown = f * c + i * g
        dout = dh + tl.load(grad_rows + out, mask, 0.0)
        if CELL_NORM:
            z, scale = _standardise_cell(shown, inside, eps, H)
            vector = d * H + j[None, :]
            weight = tl.load(weight_c + vector, inside, 0.0)
            shown = _tanh(z * weight + tl.load(bias_c + vector, inside, 0.0))
            dz = dout * o * (1 - shown * shown)
            tl.store(dbias_c + out, dz, mask)
            tl.store(dweight_c + out, dz * z, mask)
            dz *= weight
            dnew = dz - (tl.sum(dz, 1) / H)[:, None] - z * (tl.sum(dz * z, 1) / H)[:, None]
            dnew = dc + dnew * scale
        else:
            shown = _tanh(shown)
            dnew = dc + dout * o * (1 - shown * shown)
        o = dout * shown * o * (1 - o)
        dc = tl.where(mask, tl.where(carries[:, None], dnew * f, 0.0), dc)
        f = dnew * c * f * (1 - f)
        new = dnew * i * (1 - g * g)
        i = dnew * g * i * (1 - i)
        g = new
        _store_gates(dgates, row, mask, j, i, f, g, o, H)

        i, f, g, o = i * gi, f * gf, g * gg, o * go
        mean = (_sum4(i, f, g, o) / (4 * H))[:, None]
        slope = (_sum4(i * zi, f * zf, g * zg, o * zo) / (4 * H))[:, None]
        scale = tl.load(rstd + row * D + d, alive, 0.0)[:, None]
        i, f = scale * (i - mean - zi * slope), scale * (f - mean - zf * slope)
        g, o = scale * (g - mean - zg * slope), scale * (o - mean - zo * slope)
        _store_gates(dproduct, row, mask, j, i, f, g, o, H)
        tl.debug_barrier()  # all threads have written dproduct

        product = tl.zeros((SEQUENCES, HP), tl.float32)
        for start in range(0, 4 * H, BK):  # type: ignore[arg-type]
            k = start + tl.arange(0, BK)
            columns = row[:, None] * (D * 4 * H) + d * 4 * H + k[None, :]
            part = tl.load(dproduct + columns, carries[:, None] & (k < 4 * H)[None, :], 0.0)
            part = part.to(w_hh.dtype.element_ty)
            weights = w_hh + d * 4 * H * H + k[:, None] * H + j[None, :]
            weights = tl.load(weights, (k < 4 * H)[:, None] & inside, 0.0)
            product = tl.dot(part, weights, product, input_precision=PRECISION)
        dh = tl.where(mask, product, dh)
    tl.store(dh_state + state, dh, in_batch)
    tl.store(dc_state + state, dc, in_batch)


def launch_options(H: int, *, cell_norm: bool, resets: bool, backward: bool) -> dict[str, Any]:
    """Compile-time constants of a launch, chosen for few spilled registers.

    W_h h is computed in TF32 where torch's float32 products are, else as three products in TF32,
    which come close to float32.
    """
    HP = max(triton.next_power_of_2(H), 16)
    warps = 16 if backward and HP == 256 else min(max(HP // 16, 4), 8)
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        **{"H": H, "HP": HP, "BK": 16, "SEQUENCES": SEQUENCES},
        **{"CELL_NORM": cell_norm, "RESETS": resets, "PRECISION": "tf32" if tf32 else "tf32x3"},
        **{"num_warps": warps, "num_stages": 2, "enable_fp_fusion": True},
    }


def _grid(B: int, D: int) -> tuple[int, int]:
    return triton.cdiv(B, SEQUENCES), D


@torch.library.custom_op("normrnn::layer_lstm", mutates_args=())
def _layer_lstm(
    gates: Tensor,
    w_hh: Tensor,
    gamma: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight_c: Tensor | None,
    bias_c: Tensor | None,
    resets: Tensor | None,
    lengths: Tensor,
    offsets: Tensor,
    eps: float,
    backwards: bool,
    keep: bool,
) -> list[Tensor]:
    """Return h of all frames, the final h and c, and what the backward pass reads."""
    D, B, H = h0.shape
    self_check(gates.device, H, w_hh.dtype, weight_c is not None)
    outputs = _outputs(gates, h0, keep)
    outputs[1].copy_(h0)
    options = launch_options(
        H, cell_norm=weight_c is not None, resets=resets is not None, backward=False
    )
    _forward[_grid(B, D)](
        *(gates, w_hh, gamma, weight_c, bias_c, c0, resets, lengths, offsets),
        *(*outputs, B, int(backwards), eps),
        KEEP=keep,  # type: ignore[arg-type]
        **options,
    )
    return outputs


def _outputs(gates: Tensor, h0: Tensor, keep: bool) -> list[Tensor]:
    N, (D, _, H) = gates.shape[0], h0.shape
    kept = [D * 4 * H, D, D * H, D * H]
    return [
        gates.new_empty(N, D * H),
        torch.empty_like(h0),
        torch.empty_like(h0),
        *(gates.new_empty(N if keep else 0, width) for width in kept),
    ]


@_layer_lstm.register_fake
def _(gates: Tensor, w_hh: Tensor, gamma: Tensor, h0: Tensor, *rest: Any) -> list[Tensor]:  # noqa: ARG001
    return _outputs(gates, h0, rest[-1])


@torch.library.custom_op("normrnn::layer_lstm_backward", mutates_args=())
def _layer_lstm_backward(
    grad_rows: Tensor,
    grad_h: Tensor,
    grad_c: Tensor,
    gates: Tensor,
    w_hh: Tensor,
    gamma: Tensor,
    weight_c: Tensor | None,
    bias_c: Tensor | None,
    resets: Tensor | None,
    lengths: Tensor,
    offsets: Tensor,
    normed: Tensor,
    rstd: Tensor,
    c_before: Tensor,
    eps: float,
    backwards: bool,
) -> list[Tensor]:
    """Return gradients of h0, c0, gates, W_h h and, row by row, of bias_c and weight_c."""
    D, B, H = grad_h.shape
    outputs = _gradients(gates, grad_h, weight_c)
    outputs[0].copy_(grad_h)
    outputs[1].copy_(grad_c)
    options = launch_options(
        H, cell_norm=weight_c is not None, resets=resets is not None, backward=True
    )
    _backward[_grid(B, D)](
        *(grad_rows.contiguous(), gates, w_hh, gamma, weight_c, bias_c, resets, lengths, offsets),
        *(normed, rstd, c_before, *outputs, B, int(backwards), eps),
        **options,
    )
    return outputs


def _gradients(gates: Tensor, state: Tensor, weight_c: Tensor | None) -> list[Tensor]:
    N = 0 if weight_c is None else len(gates)
    both = [torch.empty(state.shape, dtype=state.dtype, device=state.device) for _ in range(2)]
    cell = [gates.new_empty(N, gates.shape[1] // 4) for _ in range(2)]
    return [*both, torch.empty_like(gates), torch.empty_like(gates), *cell]


@_layer_lstm_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    return _gradients(args[3], args[1], args[6])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    gates, w_hh, gamma, _, _, *rest, eps, backwards, keep = inputs
    ctx.static = eps, backwards
    if keep:
        normed, rstd, h_before, c_before = output[3:]
        ctx.save_for_backward(gates, w_hh, gamma, *rest, normed, rstd, c_before, h_before)


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    *saved, h_before = ctx.saved_tensors
    w_hh, weight_c, normed = saved[1], saved[3], saved[8]
    D, N = len(w_hh), len(normed)
    dh, dc, dgates, dproduct, dbias_c, dweight_c = torch.ops.normrnn.layer_lstm_backward(
        *grads[:3], *saved, *ctx.static
    )
    product, h = (v.view(N, D, -1).transpose(0, 1) for v in (dproduct, h_before))
    dw_hh = (product.transpose(1, 2) @ h).to(w_hh.dtype)
    dgamma = (dgates * normed).sum(0).view(D, -1)
    cell: list[Any] = [None, None]
    if weight_c is not None:
        cell = [v.sum(0).view(D, -1) for v in (dweight_c, dbias_c)]
    return dgates, dw_hh, dgamma, dh, dc, *cell, *[None] * 6


_layer_lstm.register_autograd(_differentiate, setup_context=_setup_context)


def check_call(spec: Spec, steps: Steps, tensors: Tensors) -> None:
    """RuntimeError if the kernels do not run this call."""
    x, H = tensors.x, tensors.w_hh.shape[1]
    more = [tensors.zoneout_h, tensors.zoneout_c, *tensors.weights(0)[3:7]]
    device = x.device.type
    reason = ""
    if spec.mode != "LSTM":
        reason = f"its cell is LSTM, not {spec.mode}"
    elif spec.kind != "row":
        reason = "its norm is 'layer'"
    elif any(t is not None for t in more):
        reason = "it has no peepholes, zoneout or projection"
    elif H > MAX_HIDDEN:
        reason = f"it has at most {MAX_HIDDEN} hidden units, got {H}"
    elif x.dtype == torch.float64:
        reason = "it computes in float32, got float64"
    elif device != "cuda" and not (INTERPRETED and device == "cpu"):
        reason = f"it needs a CUDA device or TRITON_INTERPRET=1, got tensors on {device}"
    elif isinstance(steps, Traced) and steps.batch_sizes is not None:
        reason = "a compiled graph of it takes dense batches"
    elif not steps.rows:
        reason = "it needs at least one row"
    if reason:
        raise RuntimeError(f"backend('triton') cannot run this call: {reason}")


def run(spec: Spec, steps: Steps, tensors: Tensors, dtype: torch.dtype | None = None) -> Result:
    """Run a call that :func:`check_call` accepts; ``dtype`` is that of both products."""
    x, D = tensors.x, len(spec.reverse)
    gates, _ = gate_inputs(spec, steps, tensors, dtype)
    w_hh = torch.stack([tensors.weights(d).w_hh for d in range(D)])
    w_hh = w_hh if dtype is None else w_hh.to(dtype)
    H = w_hh.shape[2]

    def vector(value: Tensor | None, width: int, default: float) -> Tensor:
        if value is None:
            return torch.full((D, width), default, device=x.device)
        return value.float().view(D, width).contiguous()

    cell = [None, None]
    if spec.cell:
        cell = [vector(tensors.weight_c, H, 1.0), vector(tensors.bias_c, H, 0.0)]
    h0, c0 = (s.float().contiguous() for s in initial_state(spec, tensors, steps.batch, x))
    inputs = gates.float().contiguous(), w_hh, vector(tensors.gamma_hh, 4 * H, 1.0), h0, c0, *cell
    resets = None if tensors.resets is None else tensors.resets.to(torch.uint8)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    rows, *state = torch.ops.normrnn.layer_lstm(
        *inputs, resets, *_layout(steps, x.device), spec.eps, spec.reverse[0], keep
    )[:3]
    return Result(rows.to(x.dtype), tuple(s.to(x.dtype) for s in state), None)


def _layout(steps: Steps, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return lengths (B,) and the first row of every step (T + 1,); dense ones without a copy."""
    if steps.is_traced or not steps.ragged:
        offsets = torch.arange(steps.time + 1, device=device) * steps.batch
        return torch.full((steps.batch,), steps.time, dtype=torch.int32, device=device), offsets
    lengths = torch.tensor(steps.lengths, dtype=torch.int32, device=device)
    return lengths, torch.tensor([*steps.offsets, steps.rows], device=device)


def self_check(device: torch.device, H: int, dtype: torch.dtype, cell: bool) -> None:
    """Compare the kernels with the loop, once per device, size and type of W_h.

    Raises a RuntimeError that names the quantity which differs.
    """
    key = device, H, dtype, cell
    if key in _checked:
        return
    _checked.add(key)  # before the calls below, which come here again
    try:
        steps, lower = Steps((19, 18, 18, 3, 2)), None if dtype == torch.float32 else dtype
        # Operators run without autograd, which the comparison needs.
        with torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False), torch.enable_grad():
            call = random_call(H, steps, cell=cell)
            errors = differences(*call, device, lower)
        limit = TOLERANCE if lower is None else 0.05
        wrong = {name: error for name, error in errors.items() if not error <= limit}
        if wrong:
            raise RuntimeError(
                f"the Triton kernel differs from the loop on {device} with {H} hidden units"
                f" (relative differences {wrong}): use another backend and report this"
            )
    except BaseException:
        _checked.discard(key)
        raise


def random_call(
    H: int,
    steps: Steps,
    *,
    reverse: tuple[bool, ...] = (False, True),
    cell: bool = False,
    has_state: bool = True,
    has_resets: bool = True,
    affine: bool = True,
    seed: int = 0,
) -> tuple[Spec, Steps, Tensors]:
    """Return a call with random tensors in float64."""
    generator, D, I = torch.Generator().manual_seed(seed), len(reverse), 3  # noqa: E741

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = [Weights(draw(4 * H, I), draw(4 * H, H) / H**0.5) for _ in reverse]
    vectors: dict[str, Tensor] = {}
    if affine:
        widths = {"weight": 4 * H, "bias": 4 * H, "gamma_hh": 4 * H}
        widths |= {"weight_c": H, "bias_c": H} if cell else {}
        vectors = {n: draw(D * w) if "bias" in n else draw(D * w).abs() + 0.5
                   for n, w in widths.items()}  # fmt: skip
    norm = Norm("row", 1e-5, cell=cell, **vectors)
    state = (draw(D, steps.batch, H), draw(D, steps.batch, H)) if has_state else None
    resets = draw(steps.rows) > 0.8 if has_resets else None
    spec, tensors = describe_call(
        "LSTM", reverse, draw(steps.rows, I), weights, norm, state, resets
    )
    return spec, steps, tensors


def differences(
    spec: Spec, steps: Steps, tensors: Tensors, device: Any, dtype: torch.dtype | None = None
) -> dict[str, float]:
    """Run a call in float64 by the loop, and on a device by the kernels.

    Returns the largest difference of every output and gradient, relative to the largest value of
    the tensor.
    """
    names = [n for n, t in zip(Tensors._fields, tensors, strict=True) if t is not None]
    names = [name for name in names if name != "resets"]

    def values(run: Any, where: Any, kind: torch.dtype, *more: Any) -> list[Tensor]:
        own = {n: getattr(tensors, n).to(where, kind, copy=True).requires_grad_() for n in names}
        if tensors.resets is not None:
            own["resets"] = tensors.resets.to(where)
        rows, state, _ = run(
            spec, steps, Tensors(**{**dict.fromkeys(Tensors._fields), **own}), *more
        )
        outputs = [rows, *state]
        heads = [torch.arange(out.numel()).cos().view(out.shape).to(out) for out in outputs]
        grads = torch.autograd.grad(outputs, [own[name] for name in names], heads)
        return [v.detach().cpu().double() for v in (*outputs, *grads)]

    labels = ["output", "h_n", "c_n", *(f"gradient of {name}" for name in names)]
    pairs = values(run, device, torch.float32, dtype), values(loop, "cpu", torch.float64)
    return {
        label: float((ours - exact).abs().max() / exact.abs().max().clamp(min=1e-3))
        for label, ours, exact in zip(labels, *pairs, strict=True)
    }
