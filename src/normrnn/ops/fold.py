"""Normalisation as a change of weights, so that plain kernels can run it.

γ (W x − μ) / √(σ² + ε) + β is W′ x + b′ with W′ = diag(s) W, b′ = β − s μ, s = γ / √(σ² + ε).
That holds for the statistics of test time, of the input transition or of the sums inside a step,
and, sequence-wise, for those of a training batch too, gradients included.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from normrnn.ops.call import Weights
from normrnn.ops.statistics import Given, wide


class PlainWeights(NamedTuple):
    """The weights of one direction as torch's layers and kernels take them."""

    w_ih: Tensor
    """(C, I)."""
    w_hh: Tensor
    """(C, H), or (C, P) of an LSTM with a projection."""
    b_ih: Tensor
    """(C,)."""
    b_hh: Tensor
    w_hr: Tensor | None = None
    """(P, H)."""


def fold_input(
    weights: Weights, gamma: Tensor | None, beta: Tensor | None, given: Given, eps: float
) -> Weights:
    """Fold the normalisation of W_x x with mean and variance (1, C)."""
    assert weights.w_ih is not None
    scale, shift = _scale_and_shift(gamma, beta, given, eps, weights.w_ih.dtype)
    return weights._replace(w_ih=_scaled(weights.w_ih, scale), bias=shift)


def fold_sums(
    weights: Weights, gamma: Tensor | None, beta: Tensor | None, given: Given, eps: float
) -> Weights:
    """Fold the normalisation of W_x x + W_h h: both matrices are scaled.

    So is the GRU's bias inside r ⊙ (W_h h + b), which is part of the candidate's sum.
    """
    folded = fold_input(weights, gamma, beta, given, eps)
    scale, _ = _scale_and_shift(gamma, beta, given, eps, weights.w_hh.dtype)
    bias_hn = weights.bias_hn
    if bias_hn is not None:
        bias_hn = (bias_hn * scale[-len(bias_hn) :]).to(bias_hn.dtype)
    return folded._replace(w_hh=_scaled(weights.w_hh, scale), bias_hn=bias_hn)


def fold_recurrent(
    weights: Weights,
    gamma: Tensor | None,
    gamma_hh: Tensor | None,
    beta: Tensor | None,
    given: Given,
    eps: float,
) -> Weights:
    """Fold the normalisations of W_x x and of W_h h, with mean and variance (1, 2C) of both.

    What the GRU's candidate subtracts from W_hn h is inside r ⊙ (…), as its bias is.
    """
    of_x, of_h = zip(*(value.reshape(-1).chunk(2) for value in given), strict=True)
    folded = fold_input(weights, gamma, beta, of_x, eps)
    w_hh, bias_hn = weights.w_hh, weights.bias_hn
    scale, shift = _scale_and_shift(gamma_hh, None, of_h, eps, w_hh.dtype)
    H = w_hh.shape[1]
    if len(w_hh) == 3 * H:
        inside = shift[2 * H :]
        bias_hn = inside if bias_hn is None else bias_hn + inside
        shift = torch.cat([shift[: 2 * H], torch.zeros_like(inside)])
    assert folded.bias is not None
    return folded._replace(w_hh=_scaled(w_hh, scale), bias_hn=bias_hn, bias=folded.bias + shift)


def fold_before(
    w_ih: Tensor, gamma: Tensor | None, beta: Tensor | None, given: Given, eps: float
) -> tuple[Tensor, Tensor]:
    """Return W_x and the change of its bias where the *input* x was normalised, by (I,)."""
    scale, shift = _scale_and_shift(gamma, beta, given, eps, w_ih.dtype)
    return (w_ih * scale).to(w_ih.dtype), w_ih @ shift


def unfold(bias: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the γ and β that leave W x + b as it is under these statistics: √(σ² + ε), μ + b."""
    return (var + eps).sqrt(), mean + bias


def _scale_and_shift(
    gamma: Tensor | None, beta: Tensor | None, given: Given, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    # A copy before a backward pass: a training step changes running statistics before that.
    copy = torch.is_grad_enabled()
    mean, var = (value.reshape(-1).to(wide(dtype), copy=copy) for value in given)
    scale = (var + eps).rsqrt()
    scale = scale if gamma is None else scale * gamma
    shift = -mean * scale if beta is None else beta - mean * scale
    return scale, shift.to(dtype)


def _scaled(matrix: Tensor, scale: Tensor) -> Tensor:
    return (matrix * scale.unsqueeze(1)).to(matrix.dtype)


def torch_weights(weights: Weights) -> PlainWeights:
    """Return the weights with two biases."""
    w_ih, w_hh, bias_hn, _, _, _, w_hr, bias = weights
    assert w_ih is not None
    b_ih = w_hh.new_zeros(len(w_hh)) if bias is None else bias
    b_hh = torch.zeros_like(b_ih)
    if bias_hn is not None:
        b_hh = torch.cat([b_hh[: -len(bias_hn)], bias_hn])
    return PlainWeights(w_ih, w_hh, b_ih, b_hh, w_hr)
