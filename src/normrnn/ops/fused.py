"""A layer by one call of torch's fused kernels, which is cuDNN on a GPU.

Where the normalisation is a change of weights, rows x go in with changed weights: statistics
shared over time, of test time or, sequence-wise, of the batch. Otherwise a normalisation of W_x x
is computed first, and ready gate inputs go in, with an identity matrix as W_ih: ``[I 0]`` and
``[0 I]`` for two directions.

T time, B batch, N rows, I input, H hidden, D directions, C = G·H.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from normrnn.ops.call import Result, Spec, State, Tensors, Weights, check_given, project
from normrnn.ops.fold import PlainWeights, fold_input, fold_recurrent, fold_sums, torch_weights
from normrnn.ops.layout import Steps
from normrnn.ops.loop import StepNorm, initial_state
from normrnn.ops.statistics import Statistics, wide, without_autocast

IDENTITY_LIMIT = 2**28
"""Largest B·D·C² for which the product with the identity should cost less than a Python loop.

An estimate without a GPU: 6·B·D²·C² operations per time step, forward and backward, at 10 TFLOP/s,
against 45·D kernel launches of 5 µs.
"""
_MODES = ("RNN_TANH", "RNN_RELU", "LSTM", "GRU")
_FOLDS: dict[str, Callable[..., Weights]] = {
    "input": fold_input,
    "step": fold_sums,
    "recurrent": fold_recurrent,
}


def can_run(spec: Spec, steps: Steps, tensors: Tensors) -> bool:
    """Whether torch's kernels run this call, which has been checked."""
    more = tensors.resets, tensors.zoneout_h, tensors.zoneout_c
    for d in range(len(spec.reverse)):
        weights = tensors.weights(d)
        more += weights.peephole_i, weights.peephole_f, weights.peephole_o
    if spec.mode not in _MODES or not steps.rows or any(t is not None for t in more):
        return False
    if spec.reverse not in ((False,), (False, True)):
        return False
    if is_change_of_weights(spec, steps, tensors):
        return True
    C = tensors.w_hh.shape[0]
    is_small = steps.batch * len(spec.reverse) * C * C <= IDENTITY_LIMIT
    return spec.kind in ("none", "input") and is_small


def is_change_of_weights(spec: Spec, steps: Steps, tensors: Tensors) -> bool:
    """Whether plain weights express the call, from the input to the output."""
    if tensors.w_ih is None:
        return False
    if spec.kind == "none":
        return True
    if spec.batch:
        return spec.kind == "input" and not spec.per_step and steps.rows > 1
    is_shared = tensors.mean is not None and len(tensors.mean) == 1
    return is_shared and spec.kind in _FOLDS and not spec.cell


def run(spec: Spec, steps: Steps, tensors: Tensors, dtype: torch.dtype | None = None) -> Result:
    """Run a call that :func:`can_run` accepts.

    Args:
        dtype: the type of the products and the recurrence, as under autocast; statistics and
            changed weights are computed in float32 or wider.
    """
    check_given(spec, steps, tensors)
    state = initial_state(spec, tensors, steps.batch, tensors.x)
    if is_change_of_weights(spec, steps, tensors):
        weights, statistics = _changed(spec, tensors)
        rows = tensors.x
    else:
        rows, statistics = gate_inputs(spec, steps, tensors, dtype)
        weights = _identities(spec, tensors)
    with precision(spec, steps, tensors):
        directions = [torch_weights(w) for w in weights]
        output, final = fused_rows(spec.mode, rows, directions, state, steps=steps, dtype=dtype)
    return Result(output, final, statistics)


def gate_inputs(
    spec: Spec, steps: Steps, tensors: Tensors, dtype: torch.dtype | None = None
) -> tuple[Tensor, Statistics | None]:
    """Return ready gate inputs (N, D·C), and the statistics of the batch."""
    pre = project(tensors, dtype).x
    return StepNorm.KINDS[spec.kind].before(spec, steps, tensors, pre)


def _changed(spec: Spec, tensors: Tensors) -> tuple[list[Weights], Statistics | None]:
    """Return the plain weights of each direction, and the statistics of the batch."""
    D = len(spec.reverse)
    weights = [tensors.weights(d) for d in range(D)]

    def by_direction(vector: Tensor | None) -> Sequence[Any]:
        return [None] * D if vector is None else vector.chunk(D, -1)

    bias = by_direction(tensors.bias)
    if spec.kind == "none":
        return [w._replace(bias=b) for w, b in zip(weights, bias, strict=True)], None
    mean, var, statistics = tensors.mean, tensors.var, None
    if spec.batch:
        mean, var = input_statistics(tensors.x, torch.cat([w.w_ih for w in weights]))  # type: ignore[misc]
        count = mean.new_full((1,), tensors.x.shape[0])
        statistics = Statistics(mean.detach()[None], var.detach()[None], count)
    gammas = [by_direction(tensors.weight)]
    if spec.kind == "recurrent":
        gammas.append(by_direction(tensors.gamma_hh))
    given = zip(by_direction(mean), by_direction(var), strict=True)
    parts = zip(weights, *gammas, bias, given, strict=True)
    return [_FOLDS[spec.kind](*part, spec.eps) for part in parts], statistics


def _identities(spec: Spec, tensors: Tensors) -> list[Weights]:
    """Return weights that take ready gate inputs, D·C of each row."""
    D, w_hh = len(spec.reverse), tensors.w_hh
    identity = torch.eye(D * len(w_hh), dtype=w_hh.dtype, device=w_hh.device)
    return [
        tensors.weights(d)._replace(w_ih=rows) for d, rows in enumerate(identity.split(len(w_hh)))
    ]


def fused_rows(
    mode: str,
    rows: Tensor,
    directions: Sequence[PlainWeights],
    state: State,
    *,
    steps: Steps,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, State]:
    """Run torch's kernel on one layer of one or two directions.

    Args:
        rows: (N, I).
        state: (h,) or (h, c), (D, B, H) each.
        dtype: the type to compute in.

    Returns:
        The output (N, D·H) and the final state, in the type of ``rows``.
    """
    kernel: Any = getattr(torch._VF, mode.lower())
    original, dtype = rows.dtype, rows.dtype if dtype is None else dtype
    flat = [w.to(dtype) for direction in directions for w in direction if w is not None]
    flat = flat if rows.is_cpu else single_buffer(flat)
    rows, start = rows.to(dtype), tuple(s.to(dtype).contiguous() for s in state)
    hx = start if mode == "LSTM" else start[0]
    # Training mode: without it cuDNN keeps nothing for the backward pass.
    options = True, 1, 0.0, torch.is_grad_enabled(), len(directions) == 2
    if steps.ragged:
        sizes = torch.tensor(steps.sizes, device="cpu")
        output, *final = kernel(rows, sizes, hx, flat, *options)
    else:
        dense = rows.reshape(steps.time, steps.batch, -1)
        output, *final = kernel(dense, hx, flat, *options, False)
        output = output.reshape(steps.rows, -1)
    return output.to(original), tuple(s.to(original) for s in final)


def single_buffer(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return weights as views of one buffer, matrices first, which is cuDNN's layout.

    Weights elsewhere in memory are copied at every call, with a warning.
    """
    order = sorted(range(len(weights)), key=lambda k: weights[k].dim() == 1)
    buffer = torch.cat([weights[k].reshape(-1) for k in order])
    views = list(weights)
    for k, view in zip(order, buffer.split([weights[k].numel() for k in order]), strict=True):
        views[k] = view.view(weights[k].shape)
    return views


@contextmanager
def precision(spec: Spec, steps: Steps, tensors: Tensors) -> Iterator[None]:
    """Turn TF32 off where gate inputs go through a product, which would round them."""
    if is_change_of_weights(spec, steps, tensors):
        yield
        return
    with without_tf32(tensors.x.device):
        yield


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
    rows, w_ih = rows.to(wide(rows.dtype)), w_ih.to(wide(rows.dtype))
    with without_tf32(rows.device), without_autocast(rows.device.type):
        if not moments_pay(rows.shape[0], rows.shape[1], len(w_ih)):
            var, mean = torch.var_mean(rows @ w_ih.t(), 0, correction=0)
            return mean, var
        mean = rows.mean(0)
        centred = rows - mean
        covariance = centred.t() @ centred / len(rows)
        return w_ih @ mean, ((w_ih @ covariance) * w_ih).sum(1).clamp(min=0)
