"""Masks of regularisers: one mask per call, from two keys of torch's generator.

Entry i is dropped where a hash of i and of the keys lies below a limit. So a mask depends on the
keys alone, not on type, device, threads or whether C draws it, and the backward pass can draw it
again. torch's generator would take longer for a mask than a time step for its products.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.ops.layout import Steps, Traced
from normrnn.ops.native.kernel import is_plain
from normrnn.ops.native.library import library

_WORD = 2**32
Keys = Tensor | Sequence[int]
_PARALLEL = 1 << 16
"""Entries from which on several threads pay."""


def locked_dropout(rows: Tensor, steps: Steps, p: float) -> Tensor:
    """Drop features of rows (N, F), the same at all steps of a sequence (Gal & Ghahramani 2016).

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
    """Drop a share p of W_h and scale up the rest (DropConnect, Wan et al. 2013)."""
    if not is_plain((w_hh,)):
        return _dropped(w_hh, _keys(w_hh), p)
    return _apply(w_hh, _keys(w_hh).tolist() if w_hh.is_cpu else _keys(w_hh), p)


def zoneout_mask(rows: int, units: int, share: float, like: Tensor) -> Tensor:
    """Return a mask (rows, units) of where an old value stays, on the device of ``like``."""
    keys = _keys(like)
    plain = is_plain((like,)) and like.is_cpu and isinstance(rows, int)
    if not plain or (loaded := library()) is None:
        return _hashed(keys, rows * units, share, like.device).view(rows, units)
    mask = torch.empty((rows, units), dtype=torch.bool, device=like.device)
    _compiled(loaded, keys.tolist(), share, mask.numel(), 1.0, mask=mask)
    return mask


def _keys(like: Tensor) -> Tensor:
    return torch.randint(0, _WORD, (2,), dtype=torch.int64, device=like.device)


def _hashed(keys: Keys, count: int, share: float, device: torch.device) -> Tensor:
    """Return which of ``count`` entries are dropped; `native/mask.h` has the same hash."""
    low = _WORD - 1
    x = (torch.arange(count, device=device) + keys[0]) & low
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & low
    x = x ^ (x >> 15)
    x = ((x ^ keys[1]) * 0x846CA68B) & low
    x = x ^ (x >> 16)
    return x < _limit(share)


def _limit(share: float) -> int:
    return min(round(share * _WORD), _WORD - 1)


def _dropped(weights: Tensor, keys: Keys, p: float) -> Tensor:
    mask = _hashed(keys, weights.numel(), p, weights.device).view(weights.shape)
    return (weights * (1 / (1 - p))).masked_fill(mask, 0)


def _compiled(
    loaded: Any, keys: Keys, share: float, count: int, scale: float, **places: Tensor
) -> None:
    threads = torch.get_num_threads() if count >= _PARALLEL else 1
    addresses = [
        places[name].data_ptr() if name in places else None for name in ("given", "made", "mask")
    ]
    loaded.drop(threads, count, *keys, _limit(share), scale, *addresses)


def _drop(weights: Tensor, keys: Keys, p: float, may_change: bool = False) -> Tensor:
    """Drop entries by C where possible, in place if allowed."""
    loaded = library()
    if loaded is None or weights.dtype != torch.float32 or not weights.is_cpu or weights.is_neg():
        return _dropped(weights, keys, p)
    solid = weights.contiguous()
    # A new tensor object even then: autograd copies a gradient that is referenced elsewhere.
    made = solid.detach() if may_change else torch.empty_like(solid)
    _compiled(loaded, keys, p, solid.numel(), 1 / (1 - p), given=solid, made=made)
    return made


class _Drop(torch.autograd.Function):
    """A linear map that is its own backward pass."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, keys: Keys, p: float) -> Tensor:
        ctx.keys, ctx.p = keys, p
        return _drop(weights, keys, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        if not is_plain((grad,)):
            return _dropped(grad, ctx.keys, ctx.p), None, None
        if torch.is_grad_enabled():
            return _apply(grad, ctx.keys, ctx.p), None, None
        # The gradient was computed for these weights alone, so it can be changed in place.
        return _drop(grad, ctx.keys, ctx.p, may_change=True), None, None


# Function.apply without transforms, and without its lookup of a signature.
_apply: Any = super(torch.autograd.Function, _Drop).apply  # type: ignore[misc]
