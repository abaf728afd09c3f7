"""Whole layers through torch's fused kernels (cuDNN on a GPU), and statistics from moments of x.

Two ways in: rows x with folded weights, for statistics shared over time, and ready gate inputs,
for any other normalisation of W_x x. The latter takes an identity matrix as W_ih: ``[I 0]`` and
``[0 I]`` for two directions.

T time, B batch, N rows, I input, H hidden, D directions, C = G·H.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normrnn.ops.statistics import without_autocast

IDENTITY_LIMIT = 2**28
"""Largest B·D·C² for which the product with the identity should cost less than a Python loop.

An estimate without a GPU: 6·B·D²·C² operations per time step, forward and backward, at 10 TFLOP/s,
against 45·D kernel launches of 5 µs.
"""


class FusedWeights(NamedTuple):
    """Plain weights of one direction: W_x (C, I), W_h (C, H) and biases (C,), as torch's kernels
    take them; ``w_hr`` (P, H) of an LSTM that projects."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor
    b_hh: Tensor
    w_hr: Tensor | None = None


def single_buffer(directions: Sequence[FusedWeights]) -> list[Tensor]:
    """The weights in the order of torch's kernels, as views of one buffer, matrices first.

    cuDNN expects this layout. Weights elsewhere in memory are copied at every call, with a warning.
    """
    matrices = [w for d in directions for w in (d.w_ih, d.w_hh)]
    vectors = [b for d in directions for b in (d.b_ih, d.b_hh)]
    parts = [*matrices, *vectors]
    buffer = torch.cat([part.reshape(-1) for part in parts])
    views = [
        view.view(part.shape)
        for view, part in zip(buffer.split([p.numel() for p in parts]), parts, strict=True)
    ]
    flat: list[Tensor] = []
    for d, direction in enumerate(directions):
        flat += [*views[2 * d : 2 * d + 2], *views[len(matrices) + 2 * d :][:2]]
        flat += [] if direction.w_hr is None else [direction.w_hr]
    return flat


def fused_rows(
    mode: str,
    rows: Tensor,
    directions: Sequence[FusedWeights],
    state: tuple[Tensor, ...],
    *,
    dense: tuple[int, int] | None = None,
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one layer of one or two directions on rows (N, I) in one call.

    ``mode`` is torch's (RNN_TANH, RNN_RELU, GRU, LSTM), ``state`` (h,) or (h, c), (D, B, H) each.
    Either ``dense``, (T, B), or ``batch_sizes`` (T,) on the CPU. Returns (N, D·H) and the state.
    """
    kernel: Any = getattr(torch._VF, mode.lower())
    start = tuple(s.contiguous() for s in state)
    hx = start if mode == "LSTM" else start[0]
    # Training mode: without it cuDNN keeps nothing for the backward pass.
    options = True, 1, 0.0, torch.is_grad_enabled(), len(directions) == 2
    flat = single_buffer(directions) if rows.is_cuda else _listed(directions)
    if batch_sizes is not None:
        output, *final = kernel(rows, batch_sizes, hx, flat, *options)
    else:
        assert dense is not None, "expected either dense or batch_sizes"
        output, *final = kernel(rows.unflatten(0, dense), hx, flat, *options, False)
        output = output.flatten(0, 1)
    return output, tuple(final)


def _listed(directions: Sequence[FusedWeights]) -> list[Tensor]:
    return [w for direction in directions for w in direction if w is not None]


def fused_gates(
    mode: str,
    gates: Tensor,
    w_hh: Sequence[Tensor],
    bias_hn: Sequence[Tensor | None],
    state: tuple[Tensor, ...],
    *,
    dense: tuple[int, int] | None = None,
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same from ready gate inputs (N, D·C), with W_h (C, H) and, of a GRU, b_hn (H,) of each
    direction. Without TF32 in the forward pass, which would round the gate inputs."""
    D, C = len(w_hh), len(w_hh[0])
    zeros, identity = gates.new_zeros(C), torch.eye(D * C, dtype=gates.dtype, device=gates.device)
    directions = [
        FusedWeights(
            identity[d * C : (d + 1) * C],
            w_hh[d],
            zeros,
            zeros if b is None else torch.cat([zeros[: C - len(b)], b]),
        )
        for d, b in enumerate(bias_hn)
    ]
    with without_tf32(gates.device):
        return fused_rows(mode, gates, directions, state, dense=dense, batch_sizes=batch_sizes)


def identity_pays(B: int, D: int, C: int) -> bool:
    """Whether :func:`fused_gates` should be faster than a loop on a GPU."""
    return B * D * C * C <= IDENTITY_LIMIT


@contextmanager
def without_tf32(device: torch.device) -> Iterator[None]:
    """On a GPU, float32 products and cuDNN's recurrent networks in full precision."""
    if device.type != "cuda":
        yield
        return
    settings: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn.rnn
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


def moments_pay(N: int, I: int, C: int) -> bool:  # noqa: E741
    """Whether the moments of x cost fewer multiplications than W_x x: N·I² + I²·C < N·I·C.

    >>> moments_pay(3200, 128, 1024), moments_pay(3200, 1024, 512)
    (True, False)
    """
    return I * (N + C) < N * C


def input_statistics(rows: Tensor, w_ih: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (C,) of W_x x over rows (N, I), differentiably, in float32 or wider.

    From the moments of x, mean W m and variance diag(W Σ Wᵀ), where :func:`moments_pay`.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    rows, w_ih = rows.to(wide), w_ih.to(wide)
    with without_tf32(rows.device), without_autocast(rows.device.type):
        if not moments_pay(rows.shape[0], rows.shape[1], len(w_ih)):
            var, mean = torch.var_mean(rows @ w_ih.t(), 0, correction=0)
            return mean, var
        mean = rows.mean(0)
        centred = rows - mean
        covariance = centred.t() @ centred / len(rows)
        return w_ih @ mean, ((w_ih @ covariance) * w_ih).sum(1).clamp(min=0)
