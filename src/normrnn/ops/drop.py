"""Masks of regularisers, drawn from torch's generator: one call, one mask."""

import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.ops.steps import Steps, Traced


def locked_dropout(rows: Tensor, steps: Steps, p: float) -> Tensor:
    """Rows (N, F) with one mask per sequence, the same at all its steps (Gal & Ghahramani 2016).

    >>> out = locked_dropout(torch.ones(5, 8), Steps((2, 2, 1)), 0.5)
    >>> torch.equal(out[0], out[2]) and torch.equal(out[2], out[4])
    True
    """
    mask = F.dropout(rows.new_ones(steps.batch, rows.shape[1]), p)
    if isinstance(steps, Traced):
        return rows * mask[steps.sequence_of_rows]
    parts = [
        (rows[run.rows].unflatten(0, (run.steps, run.width)) * mask[: run.width]).flatten(0, 1)
        for run in steps.runs
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def drop_weights(w_hh: Tensor, p: float) -> Tensor:
    """W_h without a share p of its entries, the others scaled up (DropConnect, Wan et al. 2013)."""
    return F.dropout(w_hh, p)


def zoneout_mask(rows: int, units: int, share: float, like: Tensor) -> Tensor:
    """(rows, units): 1 where an old value stays, 0 elsewhere; of the type of ``like``."""
    return like.new_empty(rows, units).bernoulli_(share)
