"""Normalisation folded into plain weights, so that torch's fused kernels can run it.

γ (W x − μ) / √(σ² + ε) + β is W′ x + b′ with W′ = diag(s) W, b′ = β − s μ, s = γ / √(σ² + ε).
That holds for the statistics of test time, and, sequence-wise, for those of a training batch
too, gradients included (paper, section 2, read backwards).
"""

import torch
from torch import Tensor

from normrnn.ops.statistics import wide

Flat = list[Tensor]
"""Weights of one layer and direction as torch's kernels take them: w_ih, w_hh, b_ih, b_hh."""


def fold(
    w_ih: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(C, I) and the normaliser's (C,) vectors -> W′ (C, I), b′ (C,)."""
    scale = (var.to(wide(w_ih.dtype)) + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return (w_ih * scale.unsqueeze(1)).to(w_ih.dtype), shift.to(w_ih.dtype)


def unfold(bias: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The γ and β that leave W x + b as it is under these statistics: √(σ² + ε), μ + b."""
    return (var + eps).sqrt(), mean + bias


def batch_fold(
    rows: Tensor, w_ih: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Folds with the statistics of W_x x over ``rows`` (N, I), differentiably.

    Returns W′ (C, I), b′ (C,), and the batch's mean and biased variance (C,), detached.
    """
    if rows.shape[0] < 2:
        raise ValueError(
            "normalising with batch statistics needs more than one row (an unpadded frame), "
            "got 1; use a larger batch, or eval() mode for running statistics"
        )
    pre = (rows @ w_ih.t()).to(wide(rows.dtype))
    var, mean = torch.var_mean(pre, 0, correction=0)
    w, b = fold(w_ih, weight, bias, mean, var, eps)
    return w, b, mean.detach(), var.detach()


def fused(
    mode: str,
    rows: Tensor,
    hx: tuple[Tensor, ...],
    flat: Flat,
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
