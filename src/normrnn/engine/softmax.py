"""Softmax cross entropy over many classes by the compiled kernels, all gradients at once."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from normrnn.ops.native.kernel import is_plain
from normrnn.ops.native.library import library


class Classified(NamedTuple):
    nats: Tensor
    """Summed over the rows, ()."""
    errors: Tensor
    """Rows in which another class was the most probable, ()."""
    d_rows: Tensor
    d_weight: Tensor
    d_bias: Tensor


def classify(rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Classified | None:
    """Score `targets` (N,) under softmax(rows Wᵀ + b); None where C cannot.

    Args:
        rows: (N, H).
        weight: (C, H); bias (C,).
    """
    loaded, given = library(), (rows, weight, bias)
    if loaded is None or not is_plain((*given, targets)) or targets.dtype != torch.int64:
        return None
    if not all(t.dtype == torch.float32 and t.is_cpu and not t.is_neg() for t in given):
        return None
    (N, H), C = rows.shape, len(weight)
    if 0 in (N, H, C) or weight.shape != (C, H) or bias.shape != (C,) or targets.shape != (N,):
        return None
    if not targets.is_cpu or int(targets.min()) < 0 or int(targets.max()) >= C:
        return None
    x, w, b, right = (t.contiguous() for t in (*given, targets))
    d_rows, d_weight, d_bias = torch.empty_like(x), torch.empty_like(w), torch.empty_like(b)
    nats = ctypes.c_double()
    pointers = [t.data_ptr() for t in (x, w, b, right, d_rows, d_weight, d_bias)]
    threads = torch.get_num_threads()
    errors = loaded.classify(N, H, C, threads, *pointers, ctypes.addressof(nats))
    return Classified(
        torch.tensor(nats.value, dtype=torch.float32, device="cpu"),
        torch.tensor(errors, device="cpu"),
        d_rows,
        d_weight,
        d_bias,
    )
