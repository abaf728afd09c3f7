"""Masks of regularisers, drawn by torch's generator."""

import torch
from torch import Tensor

from normrnn.ops.layout import Steps, Traced


def locked_dropout(rows: Tensor, steps: Steps, p: float) -> Tensor:
    """Drop features of rows (N, F), the same at all steps of a sequence (Gal & Ghahramani 2016).

    >>> out = locked_dropout(torch.ones(5, 8), Steps((2, 2, 1)), 0.5)
    >>> torch.equal(out[0], out[2]) and torch.equal(out[2], out[4])
    True
    """
    mask = torch.nn.functional.dropout(rows.new_ones(steps.batch, rows.shape[1]), p)
    if isinstance(steps, Traced):
        return rows * mask[steps.sequence_of_rows]
    return rows * torch.cat([mask[:width] for width in steps.sizes])


def drop_weights(w_hh: Tensor, p: float) -> Tensor:
    """Drop a share p of W_h and scale up the rest (DropConnect, Wan et al. 2013)."""
    return (w_hh * (1 / (1 - p))).masked_fill(draw_mask(w_hh.shape, p, w_hh), 0)


def draw_mask(shape: tuple[int, ...], p: float, like: Tensor) -> Tensor:
    """Return a mask that is true with probability p; the same one for every type of ``like``."""
    return torch.rand(shape, device=like.device) < p
