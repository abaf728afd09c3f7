"""Softmax cross entropy over many classes by the compiled kernels, all gradients at once."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from normrnn.ops.job import DIRECTION, JOB, LAYOUT
from normrnn.ops.kernel import is_plain
from normrnn.ops.library import floats, library, room


class Classified(NamedTuple):
    nats: Tensor
    """Summed over the rows, ()."""
    errors: Tensor
    """Rows in which another class was the most probable, ()."""
    d_rows: Tensor
    d_weight: Tensor
    d_bias: Tensor


def classify(rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Classified | None:
    """Of `targets` (N,) under softmax(rows Wᵀ + b); None where C does not serve.

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
    width, _ = loaded.widths(0, C)
    ld = (-(-width // 16) | 1) * 16  # as `apart` of `kernels/vector.h`
    logits, layout = room(N * ld + loaded.vector), torch.tensor([N, 0], device="cpu")
    d_rows, d_weight, d_bias = floats(N, H), floats(C, H), floats(C)
    numbers = {"T": 1, "B": N, "N": N, "H": C, "I": H, "D": 1, "ldi": H, "ldx": ld, "ldo": C}
    numbers |= {"threads": torch.get_num_threads(), "ldc": C, "x": x.data_ptr()}
    numbers |= {"sizes": layout.data_ptr(), "offsets": layout.data_ptr() + 8}
    numbers["dx_in"] = d_rows.data_ptr()
    own = {"w_ih": w, "beta": b, "pre": logits, "dx": logits, "d_w_ih": d_weight, "d_beta": d_bias}
    addresses = {name: t.data_ptr() for name, t in own.items()}
    direction = [addresses.get(name, 0) for name in DIRECTION]
    job = LAYOUT.pack(*[numbers.get(name, 0) for name in JOB], *direction, *direction)
    nats = ctypes.c_double()
    errors = loaded.classify(job, right.data_ptr(), ctypes.addressof(nats))
    return Classified(
        torch.tensor(nats.value, dtype=torch.float32, device="cpu"),
        torch.tensor(errors, device="cpu"),
        d_rows,
        d_weight,
        d_bias,
    )
