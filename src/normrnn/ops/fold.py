"""Normalisation folded into plain weights, so that torch's fused kernels can run it.

γ (W x − μ) / √(σ² + ε) + β is W′ x + b′ with W′ = diag(s) W, b′ = β − s μ, s = γ / √(σ² + ε).
That holds for the statistics of test time, of the input transition or of the sums inside a step,
and, sequence-wise, for those of a training batch too, gradients included (paper, section 2, read
backwards).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from normrnn.ops.call import Cell, State
from normrnn.ops.normalise import Fixed
from normrnn.ops.statistics import wide
from normrnn.ops.steps import Steps


class Weights(NamedTuple):
    """Of one layer and direction: W_x (C, I), the recurrent part, and the bias (C,)."""

    w_ih: Tensor
    cell: Cell
    bias: Tensor | None = None

    def flat(self) -> list[Tensor]:
        """As torch's kernels take them: w_ih, w_hh, b_ih, b_hh, and w_hr where there is one."""
        w_hh, bias_hn, _, w_hr = self.cell
        b_ih = w_hh.new_zeros(len(w_hh)) if self.bias is None else self.bias
        b_hh = torch.zeros_like(b_ih)
        if bias_hn is not None:
            b_hh = torch.cat([b_hh[: -len(bias_hn)], bias_hn])
        return [self.w_ih, w_hh, b_ih, b_hh, *([] if w_hr is None else [w_hr])]


def fold(
    weights: Weights, gamma: Tensor | None, beta: Tensor | None, fixed: Fixed, eps: float
) -> Weights:
    """The same eval output without normalising W_x x with mean and variance (1, C)."""
    scale, shift = _map(gamma, beta, fixed, eps, weights.w_ih.dtype)
    return weights._replace(w_ih=_scaled(weights.w_ih, scale), bias=shift)


def fold_inside(
    weights: Weights, gamma: Tensor | None, beta: Tensor | None, fixed: Fixed, eps: float
) -> Weights:
    """The same without normalising W_x x + W_h h: both matrices are scaled.

    So is the GRU's bias inside r ⊙ (W_h h + b), which is part of the candidate's sum.
    """
    scale, shift = _map(gamma, beta, fixed, eps, weights.w_ih.dtype)
    bias_hn = weights.cell.bias_hn
    if bias_hn is not None:
        bias_hn = (bias_hn * scale[-len(bias_hn) :]).to(bias_hn.dtype)
    cell = weights.cell._replace(w_hh=_scaled(weights.cell.w_hh, scale), bias_hn=bias_hn)
    return Weights(_scaled(weights.w_ih, scale), cell, shift)


def fold_recurrent(
    weights: Weights,
    gamma: Tensor | None,
    gamma_hh: Tensor | None,
    beta: Tensor | None,
    fixed: Fixed,
    eps: float,
) -> Weights:
    """The same without normalising W_x x and W_h h apart, with mean and variance (1, 2C) of both.

    What the GRU's candidate subtracts from W_hn h is inside r ⊙ (…), as its bias is.
    """
    of_x, of_h = zip(*(value.reshape(-1).chunk(2) for value in fixed), strict=True)
    dtype, (w_hh, bias_hn, *_) = weights.w_ih.dtype, weights.cell
    scale, shift = _map(gamma, beta, of_x, eps, dtype)
    scale_hh, shift_hh = _map(gamma_hh, None, of_h, eps, dtype)
    H = w_hh.shape[1]
    if len(w_hh) == 3 * H:
        inside = shift_hh[2 * H :]
        bias_hn = inside if bias_hn is None else bias_hn + inside
        shift_hh = torch.cat([shift_hh[: 2 * H], torch.zeros_like(inside)])
    cell = weights.cell._replace(w_hh=_scaled(w_hh, scale_hh), bias_hn=bias_hn)
    return Weights(_scaled(weights.w_ih, scale), cell, shift + shift_hh)


def fold_input(
    w_ih: Tensor, gamma: Tensor | None, beta: Tensor | None, fixed: Fixed, eps: float
) -> tuple[Tensor, Tensor]:
    """W_x and what its bias gains where the *input* x was normalised, mean and variance (I,)."""
    scale, shift = _map(gamma, beta, fixed, eps, w_ih.dtype)
    return (w_ih * scale).to(w_ih.dtype), w_ih @ shift


def _map(
    gamma: Tensor | None, beta: Tensor | None, fixed: Fixed, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """s and b′, (C,) each."""
    # A copy where there may be a way back: a pass in training changes buffers before that.
    copy = torch.is_grad_enabled()
    mean, var = (value.reshape(-1).to(wide(dtype), copy=copy) for value in fixed)
    scale = (var + eps).rsqrt()
    scale = scale if gamma is None else scale * gamma
    shift = -mean * scale if beta is None else beta - mean * scale
    return scale, shift.to(dtype)


def _scaled(matrix: Tensor, scale: Tensor) -> Tensor:
    return (matrix * scale.unsqueeze(1)).to(matrix.dtype)


def unfold(bias: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The γ and β that leave W x + b as it is under these statistics: √(σ² + ε), μ + b."""
    return (var + eps).sqrt(), mean + bias


def batch_fold(
    rows: Tensor, weights: Weights, gamma: Tensor | None, beta: Tensor | None, eps: float
) -> tuple[Weights, Fixed]:
    """Folds with the statistics of W_x x over ``rows`` (N, I), differentiably.

    Returns the folded weights, and the batch's mean and biased variance (1, C), detached.
    """
    pre = (rows @ weights.w_ih.t()).to(wide(rows.dtype))
    var, mean = torch.var_mean(pre, 0, correction=0, keepdim=True)
    return fold(weights, gamma, beta, (mean, var), eps), (mean.detach(), var.detach())


def fused(
    mode: str,
    rows: Tensor,
    hx: State,
    flat: list[Tensor],
    *,
    batch_sizes: Tensor | None = None,
    num_layers: int = 1,
    dropout: float = 0.0,
    training: bool = False,
    bidirectional: bool = False,
) -> tuple[Tensor, ...]:
    """torch's own kernel on dense (T, B, I) or, with ``batch_sizes``, packed (N, I) input.

    ``hx`` is (h0,) or (h0, c0), each (layers × directions, B, H). Returns (output, h[, c]).
    """
    kernel = getattr(torch._VF, mode.lower())
    state = hx if mode == "LSTM" else hx[0]
    how = (True, num_layers, dropout, training, bidirectional)
    if batch_sizes is None:
        return kernel(rows, state, flat, *how, False)
    return kernel(rows, batch_sizes, state, flat, *how)


def fused_direction(
    mode: str,
    rows: Tensor,
    state: State,
    weights: Weights,
    steps: Steps,
    *,
    batch_sizes: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, State]:
    """One direction from rows (N, I) through torch's kernel; each sequence is flipped by itself.

    ``state`` is (1, B, H) each, and so is the final one.
    """
    index = steps.flip(rows.device) if reverse else None
    rows = rows if index is None else rows[index]
    x = rows if batch_sizes is not None else rows.view(steps.time, steps.batch, -1)
    start = tuple(s.contiguous() for s in state)
    flat = weights.flat()
    output, *final = fused(mode, x, start, flat, batch_sizes=batch_sizes, training=True)
    output = output.reshape(steps.rows, -1)
    return (output if index is None else output[index]), tuple(final)
