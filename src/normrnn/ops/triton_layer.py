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
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from normrnn.ops.call import Norm, Weights, describe_call
from normrnn.ops.layout import Steps
from normrnn.ops.loop import loop

MAX_HIDDEN = 256
TOLERANCE = 1e-4
"""Largest relative difference from the loop in float64 that :func:`self_check` accepts."""
SEQUENCES = 16
"""Sequences per program: the fewest rows that ``tl.dot`` multiplies."""

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether TRITON_INTERPRET=1 was set: the kernels then run on the CPU, slowly."""

_Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
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
    cells,  # out (N, D·H): c
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
        out = row[:, None] * (D * H) + d * H + j[None, :]
        tl.store(rows + out, new, mask)
        if KEEP:
            tl.store(cells + out, c, mask)
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
    c0,  # (D, B, H)
    resets,  # (N,) uint8
    lengths,  # (B,)
    offsets,  # (T + 1,)
    normed,  # (N, D·4H)
    rstd,  # (N, D)
    cells,  # (N, D·H)
    dh_state,  # in and out (D, B, H): gradient of the final, then of the initial h
    dc_state,  # in and out (D, B, H)
    dgates,  # out (N, D·4H)
    dproduct,  # out (N, D·4H): gradient of W_h h
    dshown,  # out (N, D·H): gradient of what tanh reads, with CELL_NORM
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
        before = tl.zeros_like(b) + t + 2 * reverse - 1
        has_before = (before >= 0) & (before < length)
        out = row[:, None] * (D * H) + d * H + j[None, :]
        previous = tl.load(offsets + tl.maximum(before, 0)) + b
        at = previous[:, None] * (D * H) + d * H + j[None, :]
        c = tl.load(cells + at, (has_before & carries)[:, None] & inside, 0.0)
        c += tl.load(c0 + state, ((has_before == 0) & carries)[:, None] & inside, 0.0)

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
            tl.store(dshown + out, dz, mask)
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
) -> _Tensors:
    D, B, H = h0.shape
    self_check(gates.device, H, w_hh.dtype, weight_c is not None)
    outputs = _outputs(gates, h0, keep)
    options = launch_options(
        H, cell_norm=weight_c is not None, resets=resets is not None, backward=False
    )
    rows, h, c, normed, rstd, cells = outputs
    h.copy_(h0)
    _forward[_grid(B, D)](
        *(gates, w_hh, gamma, weight_c, bias_c, c0, resets, lengths, offsets),
        *(rows, h, c, normed, rstd, cells, B, int(backwards), eps),
        KEEP=keep,  # type: ignore[arg-type]
        **options,
    )
    return outputs


def _outputs(gates: Tensor, h0: Tensor, keep: bool) -> _Tensors:
    N, (D, _, H) = gates.shape[0], h0.shape
    kept = N if keep else 0
    return (
        gates.new_empty(N, D * H),
        torch.empty_like(h0),
        torch.empty_like(h0),
        gates.new_empty(kept, D * 4 * H),
        gates.new_empty(kept, D),
        gates.new_empty(kept, D * H),
    )


@_layer_lstm.register_fake
def _(gates: Tensor, w_hh: Tensor, gamma: Tensor, h0: Tensor, *rest: Any) -> _Tensors:  # noqa: ARG001
    return _outputs(gates, h0, rest[-1])


@torch.library.custom_op("normrnn::layer_lstm_backward", mutates_args=())
def _layer_lstm_backward(
    grad_rows: Tensor | None,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    gates: Tensor,
    w_hh: Tensor,
    gamma: Tensor,
    c0: Tensor,
    weight_c: Tensor | None,
    bias_c: Tensor | None,
    resets: Tensor | None,
    lengths: Tensor,
    offsets: Tensor,
    normed: Tensor,
    rstd: Tensor,
    cells: Tensor,
    eps: float,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of gates, of W_h h, of what tanh reads (empty without cell norm), of h0 and c0."""
    D, B, H = c0.shape
    grad_rows = torch.zeros_like(cells) if grad_rows is None else grad_rows.contiguous()
    dh, dc = (
        torch.zeros_like(c0) if g is None else g.clone(memory_format=torch.contiguous_format)
        for g in (grad_h, grad_c)
    )
    dgates, dproduct = torch.empty_like(gates), torch.empty_like(gates)
    dshown = cells.new_empty(0) if weight_c is None else torch.empty_like(cells)
    options = launch_options(
        H, cell_norm=weight_c is not None, resets=resets is not None, backward=True
    )
    _backward[_grid(B, D)](
        *(grad_rows, gates, w_hh, gamma, weight_c, bias_c, c0, resets, lengths, offsets),
        *(normed, rstd, cells, dh, dc, dgates, dproduct, dshown, B, int(backwards), eps),
        **options,
    )
    return dgates, dproduct, dshown, dh, dc


@_layer_lstm_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gates, c0, weight_c, cells = args[3], args[6], args[7], args[14]
    shown = cells.new_empty(0) if weight_c is None else torch.empty_like(cells)
    zeros = torch.empty_like(c0), torch.empty_like(c0)
    return torch.empty_like(gates), torch.empty_like(gates), shown, *zeros


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: _Tensors) -> None:
    gates, w_hh, gamma, h0, c0, weight_c, bias_c, resets, lengths, offsets = inputs[:10]
    ctx.eps, ctx.backwards, keep = inputs[10:]
    rows, _, _, normed, rstd, cells = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(normed, rstd, cells)
    if keep:
        ctx.save_for_backward(
            *(gates, w_hh, gamma, c0, weight_c, bias_c, resets, lengths, offsets),
            *(normed, rstd, cells, rows, h0),
        )


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, rows, h0 = ctx.saved_tensors
    _, w_hh, _, _, weight_c, _, resets, lengths, offsets, normed, _, cells = saved
    D, _, H = h0.shape
    dgates, dproduct, dshown, dh, dc = torch.ops.normrnn.layer_lstm_backward(
        *grads[:3], *saved, ctx.eps, ctx.backwards
    )
    dgamma = (dgates * normed).sum(0).view(D, -1)
    before = _states_before(rows, h0, resets, lengths, offsets, ctx.backwards)
    by_direction = (v.view(len(rows), D, -1).transpose(0, 1) for v in (dproduct, before))
    product, h = by_direction
    dw_hh = (product.transpose(1, 2) @ h).to(w_hh.dtype)
    dweight_c = dbias_c = None
    if weight_c is not None:
        z = F.layer_norm(cells.view(len(rows), D, H), (H,), eps=ctx.eps)
        dweight_c = (dshown.view_as(z) * z).sum(0)
        dbias_c = dshown.view_as(z).sum(0)
    return dgates, dw_hh, dgamma, dh, dc, dweight_c, dbias_c, *[None] * 6


def _states_before(
    rows: Tensor,
    h0: Tensor,
    resets: Tensor | None,
    lengths: Tensor,
    offsets: Tensor,
    backwards: bool,
) -> Tensor:
    """h before every frame, (N, D·H): the neighbouring row, the initial state or, at a reset, 0."""
    N, (D, B, H) = len(rows), h0.shape
    step = torch.searchsorted(offsets, torch.arange(N, device=rows.device), right=True) - 1
    sequence = torch.arange(N, device=rows.device) - offsets[step]
    found = []
    for d in range(D):
        reverse = backwards or d == 1
        has_before = step + 1 < lengths[sequence] if reverse else step > 0
        neighbour = (step + 1 if reverse else step - 1).clamp(min=0)
        index = torch.where(has_before, B + offsets[neighbour] + sequence, sequence)
        h = torch.cat([h0[d], rows[:, d * H : (d + 1) * H]])[index]
        if resets is not None:
            at = (offsets[neighbour] + sequence).clamp(max=N - 1)
            cut = (resets[at] != 0) & has_before if reverse else resets != 0
            h = h.masked_fill(cut[:, None], 0)
        found.append(h)
    return torch.cat(found, 1)


_layer_lstm.register_autograd(_differentiate, setup_context=_setup_context)


def _layout(steps: Steps, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lengths (B,) and the first row of every step (T + 1,); no copy from the host if dense."""
    if not steps.ragged:
        offsets = torch.arange(steps.time + 1, device=device) * steps.batch
        return torch.full((steps.batch,), steps.time, dtype=torch.int32, device=device), offsets
    lengths = torch.tensor(steps.lengths, dtype=torch.int32, device=device)
    return lengths, torch.tensor([*steps.offsets, steps.rows], device=device)


def layer_lstm(
    gates: Tensor,
    w_hh: Tensor,
    gamma: Tensor | None,
    steps: Steps,
    *,
    state: tuple[Tensor, Tensor] | None = None,
    resets: Tensor | None = None,
    reverse: tuple[bool, ...] = (False,),
    cell_norm: bool = False,
    weight_c: Tensor | None = None,
    bias_c: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run LSTM steps with LN(W_h h; γ_h) on ready gate inputs, one or two directions in one launch.

    ``gates`` (N, D·4H), ``w_hh`` (D, 4H, H), ``gamma`` (D, 4H), ``state`` (D, B, H) each,
    ``resets`` (N,), ``weight_c`` and ``bias_c`` (D, H). Returns h (N, D·H) and the final state, in
    float32.
    ``w_hh`` may be float16 or bfloat16: the product W_h h then has that precision.
    There is no second derivative: use the loop for it.
    """
    D, H = w_hh.shape[0], w_hh.shape[2]
    if reverse not in ((False,), (True,), (False, True)) or len(reverse) != D:
        raise ValueError(f"expected one direction, or forward and backward, got {reverse}, D = {D}")
    if not 0 < H <= MAX_HIDDEN:
        raise ValueError(f"the Triton kernel has 1 to {MAX_HIDDEN} hidden units, got {H}")
    if gates.shape != (steps.rows, D * 4 * H) or w_hh.shape[1] != 4 * H:
        raise ValueError(f"expected gates {(steps.rows, D * 4 * H)}, got {tuple(gates.shape)}")
    if gates.dtype == torch.float64 or w_hh.dtype == torch.float64:
        raise ValueError("the Triton kernel computes in float32: use the loop for float64")
    device = gates.device
    if device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"the Triton kernel runs on a GPU, got tensors on {device}")
    if gates.dim() != 2 or steps.rows == 0:
        raise ValueError("the Triton kernel needs at least one row")
    wide = [gates.float().contiguous(), w_hh.contiguous()]
    zeros = torch.zeros(D, steps.batch, H, device=device)
    h0, c0 = (zeros, zeros) if state is None else (s.float().contiguous() for s in state)
    ones = torch.ones(D, 4 * H, device=device)
    gamma = ones if gamma is None else gamma.float().contiguous()
    if cell_norm:
        ones = torch.ones(D, H, device=device)
        weight_c = ones if weight_c is None else weight_c.float().contiguous()
        bias_c = torch.zeros_like(ones) if bias_c is None else bias_c.float().contiguous()
    else:
        weight_c = bias_c = None
    lengths, offsets = _layout(steps, device)
    marks = None if resets is None else resets.to(torch.uint8).contiguous()
    inputs = (*wide, gamma, h0, c0, weight_c, bias_c)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    rows, h, c, *_ = torch.ops.normrnn.layer_lstm(
        *inputs, marks, lengths, offsets, eps, reverse[0], keep
    )
    return rows, (h, c)


def self_check(device: torch.device, H: int, dtype: torch.dtype, cell_norm: bool) -> None:
    """Compare the kernels with the loop in float64, once per device, size and type.

    Raises a RuntimeError that names the quantity which differs.
    """
    key = device, H, dtype, cell_norm
    if key in _checked:
        return
    _checked.add(key)  # before the calls below, which come here again
    try:
        # Operators run without autograd, which the comparison needs.
        with torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False), torch.enable_grad():
            errors = compare_with_reference(device, H, dtype=dtype, cell_norm=cell_norm)
        limit = TOLERANCE if dtype == torch.float32 else 0.05
        wrong = {name: error for name, error in errors.items() if not error <= limit}
        if wrong:
            raise RuntimeError(
                f"the Triton kernel differs from the loop on {device} with {H} hidden units"
                f" (relative differences {wrong}): use another backend and report this"
            )
    except BaseException:
        _checked.discard(key)
        raise


def compare_with_reference(
    device: torch.device | str,
    H: int,
    *,
    dtype: torch.dtype = torch.float32,
    cell_norm: bool = False,
    lengths: tuple[int, ...] = (5, 5, 4, *[3] * 14, 1),
    bidirectional: bool = True,
    with_state: bool = True,
    with_resets: bool = True,
    affine: bool = True,
    seed: int = 0,
) -> dict[str, float]:
    """Run random weights and inputs through the kernels and through the naive loop in float64.

    Returns the largest difference of every output and gradient, relative to the largest value of
    the tensor. ``dtype`` is the type of W_h, ``lengths`` go from long to short.
    """
    T, B, D, I = max(lengths), len(lengths), 1 + bidirectional, 3  # noqa: E741
    names = ("", "_reverse")[:D]
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).double()

    p = {"x": draw(T, B, I)}
    for name in names:
        p[f"weight_ih_l0{name}"] = draw(4 * H, I)
        p[f"weight_hh_l0{name}"] = (draw(4 * H, H) / H**0.5).to(dtype).double()
        if affine:
            p[f"norm_l0{name}.weight"] = draw(4 * H).abs() + 0.5
            p[f"norm_l0{name}.gamma_hh"] = draw(4 * H).abs() + 0.5
            p[f"norm_l0{name}.bias"] = draw(4 * H)
        if affine and cell_norm:
            p[f"norm_l0{name}.weight_c"] = draw(H).abs() + 0.5
            p[f"norm_l0{name}.bias_c"] = draw(H)
    if with_state:
        p |= {"h": draw(D, B, H), "c": draw(D, B, H)}
    resets = draw(T, B) > 0.8 if with_resets else None
    heads = [draw(T, B, D * H), draw(D, B, H), draw(D, B, H)]
    exact = {name: value.requires_grad_() for name, value in p.items()}
    inside = torch.arange(T)[:, None] < torch.tensor(lengths)

    def joined(name: str) -> Tensor | None:
        found = [exact.get(name.format(suffix)) for suffix in names]
        return None if found[0] is None else torch.cat(found)  # type: ignore[arg-type]

    norm = Norm(
        *("row", 1e-5, False, False, cell_norm),
        weight=joined("norm_l0{}.weight"),
        bias=joined("norm_l0{}.bias"),
        gamma_hh=joined("norm_l0{}.gamma_hh"),
        weight_c=joined("norm_l0{}.weight_c"),
        bias_c=joined("norm_l0{}.bias_c"),
    )
    weights = [Weights(exact[f"weight_ih_l0{n}"], exact[f"weight_hh_l0{n}"]) for n in names]
    spec, tensors = describe_call(
        "LSTM",
        (False, True)[:D],
        exact["x"][inside],
        weights,
        norm,
        (exact["h"], exact["c"]) if with_state else None,
        None if resets is None else resets[inside],
    )
    result = loop(spec, Steps.packed(inside.sum(1)), tensors)
    output = result.rows.new_zeros(T, B, D * H)
    output = output.masked_scatter(inside[..., None], result.rows)
    expected = [output, *result.state]
    expected += torch.autograd.grad(expected, list(exact.values()), heads)

    ours = {name: value.detach().float().to(device) for name, value in p.items()}
    found = _run_layer(ours, names, lengths, resets, H, dtype, cell_norm)
    found += torch.autograd.grad(found, list(ours.values()), [g.float().to(device) for g in heads])
    labels = ["output", "h_n", "c_n", *(f"gradient of {name}" for name in p)]
    errors = {}
    for label, a, e in zip(labels, found, expected, strict=True):
        actual, exact_value = a.detach().cpu().double(), e.detach()
        largest = exact_value.abs().max().clamp(min=1e-3)
        errors[label] = float((actual - exact_value).abs().max() / largest)
    return errors


def _run_layer(
    p: dict[str, Tensor],
    names: tuple[str, ...],
    lengths: tuple[int, ...],
    resets: Tensor | None,
    H: int,
    dtype: torch.dtype,
    cell_norm: bool,
) -> list[Tensor]:
    """Padded output (T, B, D·H) and the final state of the whole layer, from named parameters."""
    for value in p.values():
        value.requires_grad_()

    def stacked(name: str) -> Tensor | None:
        found = [p.get(name.format(suffix)) for suffix in names]
        return None if found[0] is None else torch.stack(found)  # type: ignore[arg-type]

    T, device = p["x"].shape[0], p["x"].device
    inside = torch.arange(T, device=device)[:, None] < torch.tensor(lengths, device=device)
    gates = [
        F.layer_norm(
            p["x"][inside] @ p[f"weight_ih_l0{name}"].t(),
            (4 * H,),
            p.get(f"norm_l0{name}.weight"),
            p.get(f"norm_l0{name}.bias"),
        )
        for name in names
    ]
    w_hh = stacked("weight_hh_l0{}")
    assert w_hh is not None
    rows, (h, c) = layer_lstm(
        torch.cat(gates, 1),
        w_hh.to(dtype),
        stacked("norm_l0{}.gamma_hh"),
        Steps.packed([sum(n > t for n in lengths) for t in range(T)]),
        state=(p["h"], p["c"]) if "h" in p else None,
        resets=None if resets is None else resets.to(device)[inside],
        reverse=(False, True)[: len(names)],
        cell_norm=cell_norm,
        weight_c=stacked("norm_l0{}.weight_c"),
        bias_c=stacked("norm_l0{}.bias_c"),
    )
    output = torch.zeros(*inside.shape, rows.shape[1], device=device)
    return [output.masked_scatter(inside[..., None], rows), h, c]
