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
from normrnn.ops.fused import gate_inputs, without_tf32
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
def _load4(at, mask, stride: tl.constexpr):
    """What the four gates have at some places, which are a stride apart."""
    i = tl.load(at, mask, 0.0)
    f = tl.load(at + stride, mask, 0.0)
    g = tl.load(at + 2 * stride, mask, 0.0)
    o = tl.load(at + 3 * stride, mask, 0.0)
    return i, f, g, o


@triton.jit
def _store4(at, i, f, g, o, mask, H: tl.constexpr):
    tl.store(at, i, mask)
    tl.store(at + H, f, mask)
    tl.store(at + 2 * H, g, mask)
    tl.store(at + 3 * H, o, mask)


@triton.jit
def _block(lengths, B, backwards, H: tl.constexpr, HP: tl.constexpr, SEQUENCES: tl.constexpr):
    """The sequences of a program: whether time runs backwards, numbers, lengths, the longest
    length, the places of their states (SEQUENCES, HP), and which of these are there."""
    d, first = tl.program_id(1), tl.program_id(0) * SEQUENCES
    reverse = tl.minimum(d + backwards, 1)
    b = first + tl.arange(0, SEQUENCES)
    length = tl.load(lengths + b, b < B, 0)
    j = tl.arange(0, HP)[None, :]
    state = (d * B + b).to(tl.int64)[:, None] * H + j
    return reverse, b, length, tl.load(lengths + first), state, (b < B)[:, None] & (j < H)


@triton.jit
def _frame(t, b, length, resets, offsets, reverse, RESETS: tl.constexpr):
    """Which sequences have frame t, their rows, and which carry on the state before it."""
    alive = t < length
    carries = alive
    if RESETS:  # in reverse, the border is after the frame
        border = t + reverse
        mark = tl.load(resets + tl.load(offsets + border) + b, border < length, 0)
        carries = alive & (mark == 0)
    return alive, tl.load(offsets + t) + b, carries


@triton.jit
def _forward(
    gates,  # (N, D·4H)
    w_hh,  # (D, 4H, H)
    gamma,  # (D, 4H)
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
    RESETS: tl.constexpr,
    KEEP: tl.constexpr,  # whether to write what the backward pass needs
    PRECISION: tl.constexpr,
):
    d, D = tl.program_id(1), tl.num_programs(1)
    reverse, b, length, T, state, in_batch = _block(lengths, B, backwards, H, HP, SEQUENCES)
    j = tl.arange(0, HP)[None, :]
    inside = j < H
    gi, gf, gg, go = _load4(gamma + d * 4 * H + j, inside, H)
    c = tl.load(c0 + state, in_batch, 0.0)
    first = (d * B + b).to(tl.int64)[:, None] * H
    for s in range(T):
        t = tl.where(reverse == 1, T - 1 - s, s)
        alive, row, carries = _frame(t, b, length, resets, offsets, reverse, RESETS)
        mask = alive[:, None] & inside
        if RESETS:
            c = tl.where(alive[:, None] & (carries == 0)[:, None], 0.0, c)
        out = row[:, None] * (D * H) + d * H + j
        at = row[:, None] * (D * 4 * H) + d * 4 * H + j
        if KEEP:
            tl.store(h_before + out, tl.load(h + state, carries[:, None] & inside, 0.0), mask)
            tl.store(c_before + out, c, mask)
        i = tl.zeros((SEQUENCES, HP), tl.float32)
        f = tl.zeros((SEQUENCES, HP), tl.float32)
        g = tl.zeros((SEQUENCES, HP), tl.float32)
        o = tl.zeros((SEQUENCES, HP), tl.float32)
        for start in range(0, H, BK):
            k = start + tl.arange(0, BK)
            part = tl.load(h + first + k[None, :], carries[:, None] & (k < H)[None, :], 0.0)
            part = part.to(w_hh.dtype.element_ty)
            weights, there = w_hh + d * 4 * H * H + j * H + k[:, None], (k < H)[:, None] & inside
            wi, wf, wg, wo = _load4(weights, there, H * H)
            i = tl.dot(part, wi, i, input_precision=PRECISION)
            f = tl.dot(part, wf, f, input_precision=PRECISION)
            g = tl.dot(part, wg, g, input_precision=PRECISION)
            o = tl.dot(part, wo, o, input_precision=PRECISION)
        mean = (_sum4(i, f, g, o) / (4 * H))[:, None]
        i = tl.where(inside, i - mean, 0.0)
        f = tl.where(inside, f - mean, 0.0)
        g = tl.where(inside, g - mean, 0.0)
        o = tl.where(inside, o - mean, 0.0)
        scale = tl.rsqrt(_sum4(i * i, f * f, g * g, o * o) / (4 * H) + eps)
        i, f, g, o = i * scale[:, None], f * scale[:, None], g * scale[:, None], o * scale[:, None]
        if KEEP:
            _store4(normed + at, i, f, g, o, mask, H)
            tl.store(rstd + row * D + d, scale, alive)
        xi, xf, xg, xo = _load4(gates + at, mask, H)
        new = tl.sigmoid(f * gf + xf) * c + tl.sigmoid(i * gi + xi) * _tanh(g * gg + xg)
        c = tl.where(mask, new, c)
        new = tl.sigmoid(o * go + xo) * _tanh(c)
        tl.store(rows + out, new, mask)
        tl.debug_barrier()  # all threads have read h
        tl.store(h + state, new, mask)
        tl.debug_barrier()  # all threads have written h
    tl.store(c_n + state, c, in_batch)


@triton.jit
def _backward(
    grad_rows,  # (N, D·H)
    gates,  # (N, D·4H)
    w_hh,  # (D, 4H, H)
    gamma,  # (D, 4H)
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
    B,
    backwards,
    H: tl.constexpr,
    HP: tl.constexpr,
    BK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    RESETS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    d, D = tl.program_id(1), tl.num_programs(1)
    reverse, b, length, T, state, in_batch = _block(lengths, B, backwards, H, HP, SEQUENCES)
    j = tl.arange(0, HP)[None, :]
    inside = j < H
    dh = tl.load(dh_state + state, in_batch, 0.0)
    dc = tl.load(dc_state + state, in_batch, 0.0)
    for s in range(T):
        t = tl.where(reverse == 1, s, T - 1 - s)
        alive, row, carries = _frame(t, b, length, resets, offsets, reverse, RESETS)
        mask = alive[:, None] & inside
        out = row[:, None] * (D * H) + d * H + j
        at = row[:, None] * (D * 4 * H) + d * 4 * H + j
        c = tl.load(c_before + out, mask, 0.0)
        zi, zf, zg, zo = _load4(normed + at, mask, H)
        i, f, g, o = _load4(gates + at, mask, H)
        gi, gf, gg, go = _load4(gamma + d * 4 * H + j, inside, H)
        i, f = tl.sigmoid(zi * gi + i), tl.sigmoid(zf * gf + f)
        g, o = _tanh(zg * gg + g), tl.sigmoid(zo * go + o)
        shown = _tanh(f * c + i * g)
        dout = dh + tl.load(grad_rows + out, mask, 0.0)
        dnew = dc + dout * o * (1 - shown * shown)
        o = dout * shown * o * (1 - o)
        dc = tl.where(mask, tl.where(carries[:, None], dnew * f, 0.0), dc)
        f = dnew * c * f * (1 - f)
        new = dnew * i * (1 - g * g)
        i = dnew * g * i * (1 - i)
        g = new
        _store4(dgates + at, i, f, g, o, mask, H)

        i, f, g, o = i * gi, f * gf, g * gg, o * go
        mean = (_sum4(i, f, g, o) / (4 * H))[:, None]
        slope = (_sum4(i * zi, f * zf, g * zg, o * zo) / (4 * H))[:, None]
        scale = tl.load(rstd + row * D + d, alive, 0.0)[:, None]
        i, f = scale * (i - mean - zi * slope), scale * (f - mean - zf * slope)
        g, o = scale * (g - mean - zg * slope), scale * (o - mean - zo * slope)
        _store4(dproduct + at, i, f, g, o, mask, H)
        tl.debug_barrier()  # all threads have written dproduct

        product = tl.zeros((SEQUENCES, HP), tl.float32)
        for start in range(0, 4 * H, BK):  # type: ignore[arg-type]
            k = start + tl.arange(0, BK)
            columns = row[:, None] * (D * 4 * H) + d * 4 * H + k[None, :]
            part = tl.load(dproduct + columns, carries[:, None] & (k < 4 * H)[None, :], 0.0)
            weights = w_hh + d * 4 * H * H + k[:, None] * H + j
            weights = tl.load(weights, (k < 4 * H)[:, None] & inside, 0.0)
            part = part.to(w_hh.dtype.element_ty)
            product = tl.dot(part, weights, product, input_precision=PRECISION)
        dh = tl.where(mask, product, dh)
    tl.store(dh_state + state, dh, in_batch)
    tl.store(dc_state + state, dc, in_batch)


def launch_options(H: int, *, resets: bool, backward: bool) -> dict[str, Any]:
    """Compile-time constants of a launch, chosen for few spilled registers.

    W_h h is computed in TF32 where torch's float32 products are, else as three products in TF32,
    which come close to float32.
    """
    HP = max(triton.next_power_of_2(H), 16)
    warps = 16 if backward and HP == 256 else min(max(HP // 16, 4), 8)
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        **{"H": H, "HP": HP, "BK": 16, "SEQUENCES": SEQUENCES},
        **{"RESETS": resets, "PRECISION": "tf32" if tf32 else "tf32x3"},
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
    resets: Tensor | None,
    lengths: Tensor,
    offsets: Tensor,
    eps: float,
    backwards: bool,
    keep: bool,
) -> list[Tensor]:
    """Return h of all frames, the final h and c, and what the backward pass reads."""
    D, B, H = h0.shape
    self_check(gates.device, H, w_hh.dtype)
    outputs = _outputs(gates, h0, keep)
    outputs[1].copy_(h0)
    options = launch_options(H, resets=resets is not None, backward=False)
    _forward[_grid(B, D)](
        *(gates, w_hh, gamma, c0, resets, lengths, offsets),
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
    resets: Tensor | None,
    lengths: Tensor,
    offsets: Tensor,
    normed: Tensor,
    rstd: Tensor,
    c_before: Tensor,
    backwards: bool,
) -> list[Tensor]:
    """Return gradients of h0, c0, gates and W_h h."""
    D, B, H = grad_h.shape
    outputs = _gradients(gates, grad_h)
    outputs[0].copy_(grad_h)
    outputs[1].copy_(grad_c)
    options = launch_options(H, resets=resets is not None, backward=True)
    _backward[_grid(B, D)](
        *(grad_rows.contiguous(), gates, w_hh, gamma, resets, lengths, offsets),
        *(normed, rstd, c_before, *outputs, B, int(backwards)),
        **options,
    )
    return outputs


def _gradients(gates: Tensor, state: Tensor) -> list[Tensor]:
    both = [torch.empty(state.shape, dtype=state.dtype, device=state.device) for _ in range(2)]
    return [*both, torch.empty_like(gates), torch.empty_like(gates)]


@_layer_lstm_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    return _gradients(args[3], args[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    gates, w_hh, gamma, _, _, *layout, _, ctx.backwards, keep = inputs
    if keep:
        normed, rstd, h_before, c_before = output[3:]
        ctx.save_for_backward(gates, w_hh, gamma, *layout, normed, rstd, c_before, h_before)


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    *saved, h_before = ctx.saved_tensors
    w_hh, normed = saved[1], saved[6]
    D, N = len(w_hh), len(normed)
    dh, dc, dgates, dproduct = torch.ops.normrnn.layer_lstm_backward(
        *grads[:3], *saved, ctx.backwards
    )
    product, h = (v.view(N, D, -1).transpose(0, 1) for v in (dproduct, h_before))
    dw_hh = (product.transpose(1, 2) @ h).to(w_hh.dtype)
    dgamma = (dgates * normed).sum(0).view(D, -1)
    return dgates, dw_hh, dgamma, dh, dc, *[None] * 6


_layer_lstm.register_autograd(_differentiate, setup_context=_setup_context)


def check_call(spec: Spec, steps: Steps, tensors: Tensors) -> None:
    """RuntimeError if the kernels do not run this call."""
    x, H, device = tensors.x, tensors.w_hh.shape[1], tensors.x.device.type
    more = tensors.zoneout_h, tensors.zoneout_c
    for d in range(len(spec.reverse)):
        weights = tensors.weights(d)
        more += weights.peephole_i, weights.peephole_f, weights.peephole_o, weights.w_hr
    is_here = device == "cuda" or (INTERPRETED and device == "cpu")
    is_ragged_graph = isinstance(steps, Traced) and steps.batch_sizes is not None
    for is_wrong, reason in (
        (spec.mode != "LSTM", f"its cell is LSTM, not {spec.mode}"),
        (spec.kind != "row", "its norm is 'layer'"),
        (spec.cell, "it has no cell_norm"),
        (any(t is not None for t in more), "it has no peepholes, zoneout or projection"),
        (tensors.reset_h is not None, "it has no reset_to="),
        (H > MAX_HIDDEN, f"it has at most {MAX_HIDDEN} hidden units, got {H}"),
        (x.dtype == torch.float64, "it computes in float32, got float64"),
        (not is_here, f"it needs CUDA or TRITON_INTERPRET=1, got tensors on {device}"),
        (is_ragged_graph, "a compiled graph of it takes dense batches"),
        (not steps.rows, "it needs at least one row"),
    ):
        if is_wrong:
            raise RuntimeError(f"backend('triton') cannot run this call: {reason}")


def run(spec: Spec, steps: Steps, tensors: Tensors, dtype: torch.dtype | None = None) -> Result:
    """Run a call that :func:`check_call` accepts; ``dtype`` is that of both products."""
    x, D = tensors.x, len(spec.reverse)
    gates, _ = gate_inputs(spec, steps, tensors, dtype)
    w_hh = torch.stack([tensors.weights(d).w_hh for d in range(D)])
    w_hh = w_hh if dtype is None else w_hh.to(dtype)
    if INTERPRETED and w_hh.dtype == torch.bfloat16:
        w_hh = w_hh.float()  # the interpreter has no products of bfloat16
    gamma = tensors.gamma_hh
    gamma = torch.ones(w_hh.shape[:2], device=x.device) if gamma is None else gamma.float()
    h0, c0 = (s.float().contiguous() for s in initial_state(spec, tensors, steps.batch, x))
    inputs = gates.float().contiguous(), w_hh, gamma.reshape(D, -1), h0, c0
    resets = None if tensors.resets is None else tensors.resets.to(torch.uint8)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
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


def self_check(device: torch.device, H: int, dtype: torch.dtype) -> None:
    """Compare the kernels with the loop, once per device, size and type of W_h.

    Raises a RuntimeError that names the quantity which differs.
    """
    key = device, H, dtype
    if key in _checked:
        return
    _checked.add(key)  # before the calls below, which come here again
    try:
        steps, lower = Steps((17, 16, 2)), None if dtype == torch.float32 else dtype
        # Operators run without autograd, which the comparison needs.
        with_autograd = torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False)
        with with_autograd, torch.enable_grad(), without_tf32(device):
            errors = differences(*random_call(H, steps), device, lower)
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
    H: int, steps: Steps, reverse: tuple[bool, ...] = (False, True), seed: int = 0
) -> tuple[Spec, Steps, Tensors]:
    """Return a call with random tensors in float64."""
    generator, C = torch.Generator().manual_seed(seed), len(reverse) * 4 * H

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = [Weights(draw(4 * H, 3), draw(4 * H, H) / H**0.5) for _ in reverse]
    gammas = {name: draw(C).abs() + 0.5 for name in ("weight", "gamma_hh")}
    norm = Norm("row", 1e-5, bias=draw(C), **gammas)
    state = draw(len(reverse), steps.batch, H), draw(len(reverse), steps.batch, H)
    resets = draw(steps.rows) > 0.8
    spec, tensors = describe_call(
        "LSTM", reverse, draw(steps.rows, 3), weights, norm, state, resets
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
