"""Optional C kernels: the element-wise half of an LSTM step, normalisation, transposition.

They are compiled when they are first wanted (`build`) and called through ctypes. Without a
compiler, or with ``NORMRNN_NATIVE=0``, the same numbers come from torch's own kernels; see
``benchmarks/NOTES.md`` for what they pay.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from normrnn.ops import build
from normrnn.ops.cells import LSTMTrace, Peephole, StateGradient, add_product_, carry
from normrnn.ops.steps import Steps

_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = ["-O3", "-std=c99", "-fPIC", "-march=native", "-funroll-loops"]
# Fused multiply-add, and no errno or floating-point traps to preserve; NaN keeps its meaning.
_FLAGS += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel, or None where there is none to be had."""
    if os.environ.get("NORMRNN_NATIVE", "1") == "0":
        return None
    try:
        path = build.library("native", [build.Source(_SOURCE)], [*_FLAGS, *_sharing()])
        return None if path is None else _load(path)
    except (OSError, RuntimeError, AttributeError):
        return None  # optional in every way: no home directory, a loader that will not, …


def usable(gates: Tensor) -> bool:
    """Whether the kernel can take these gates: float32 on a CPU."""
    return gates.dtype == torch.float32 and gates.device.type == "cpu" and library() is not None


def _sharing() -> list[str]:
    """OpenMP, if torch brings the GNU runtime under its own name: then it is the same threads.

    Otherwise the loader would bring a second runtime, whose threads fight with torch's.
    """
    runtime = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    return ["-fopenmp"] if runtime.exists() else []


def _load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    loaded.normrnn_lstm_forward.argtypes = [size] * 4 + [pointer] * 8
    loaded.normrnn_lstm_backward.argtypes = [size] * 5 + [pointer] * 9
    loaded.normrnn_normalise.argtypes = [size] * 3 + [ctypes.c_float] + [pointer] * 7
    loaded.normrnn_normalise_backward.argtypes = [size] * 3 + [pointer] * 8
    loaded.normrnn_transpose.argtypes = [size] * 2 + [pointer] * 2
    loaded.normrnn_update.argtypes = [size] * 2 + [ctypes.c_float] * 2 + [pointer] * 4
    for name in ("lstm_forward", "lstm_backward", "normalise", "normalise_backward", "transpose"):
        getattr(loaded, f"normrnn_{name}").restype = None
    return loaded


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _solid(vector: Tensor | None) -> Tensor | None:
    """A parameter as the kernels read it; whoever takes its address must keep it."""
    return None if vector is None else vector.to(torch.float32).contiguous()


def transposed(matrix: Tensor) -> Tensor:
    """A contiguous copy of the transpose."""
    if not (usable(matrix) and matrix.is_contiguous()):
        return matrix.t().contiguous()
    copy = matrix.new_empty(matrix.shape[1], matrix.shape[0])
    _kernels().normrnn_transpose(*matrix.shape, matrix.data_ptr(), copy.data_ptr())
    return copy


def normalise(
    pre: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(C, N) in ``groups`` equal parts -> normalised, mean, biased variance, 1/√(var + ε)."""
    C, N = pre.shape
    out = torch.empty_like(pre)
    mean, var, invstd = pre.new_empty(3, C, groups).unbind(0)
    vectors = _solid(weight), _solid(bias), out, mean, var, invstd
    sizes = C * groups, N // groups, groups
    _kernels().normrnn_normalise(*sizes, eps, pre.data_ptr(), *map(_address, vectors))
    return out, mean, var, invstd


def normalise_backward(
    d: Tensor, pre: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``pre`` (C, N), and of weight and bias, (C, groups) to be added up."""
    C, N = pre.shape
    d_pre = torch.empty_like(pre)
    sum_d, sum_dx = pre.new_empty(2, C, groups).unbind(0)
    tensors = d, pre, _solid(weight), mean, invstd, d_pre, sum_d, sum_dx
    sizes = C * groups, N // groups, groups
    _kernels().normrnn_normalise_backward(*sizes, *map(_address, tensors))
    return d_pre, sum_dx, sum_d


def update_running(
    mean: Tensor, var: Tensor, batch_mean: Tensor, batch_var: Tensor, width: int, share: float
) -> bool:
    """Buffers (C,) from K groups of ``width`` rows, (C, K); False if a value is not finite."""
    C, K = batch_mean.shape
    rows = K * width
    tensors = batch_mean, batch_var, mean, var
    unbias = rows / (rows - 1)
    return bool(_kernels().normrnn_update(C, K, share, unbias, *map(_address, tensors)))


def lstm_forward(
    gates: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight: Tensor,
    peephole: Peephole,
    steps: Steps,
    reverse: bool,
    from_zero: bool,
) -> LSTMTrace:
    """As :func:`normrnn.ops.cells.lstm_forward`."""
    kernel = _kernels().normrnn_lstm_forward
    H, N = h0.shape[0], gates.shape[1]
    hs = gates.new_empty(H, N)
    cs, tanh_cs = torch.empty_like(hs), torch.empty_like(hs)
    g0, cs0, tc0, hs0 = (x.data_ptr() for x in (gates, cs, tanh_cs, hs))
    solid = [_solid(p) for p in peephole]
    diagonals = [_address(p) for p in solid]
    cells = _Before(cs, c0, steps, reverse)
    all_g, all_h, h = steps.cut(gates), steps.cut(hs), h0
    for t in steps.order(reverse):
        b, at = steps.sizes[t], 4 * steps.offsets[t]
        if h is not h0 or not from_zero:
            add_product_(all_g[t], weight, carry(h, b, h0))
        before, stride = cells.at(t)
        kernel(H, b, N, stride, g0 + at, before, cs0 + at, tc0 + at, hs0 + at, *diagonals)
        h = all_h[t]
    return LSTMTrace(gates, cs, tanh_cs, hs)


def lstm_backward(
    dhs: Tensor,
    dc: Tensor,
    trace: LSTMTrace,
    dh0: Tensor | None,
    c0: Tensor,
    weight_t: Tensor,
    peephole: Peephole,
    steps: Steps,
    reverse: bool,
) -> Tensor:
    """As :func:`normrnn.ops.cells.lstm_backward`."""
    kernel = _kernels().normrnn_lstm_backward
    H, N = trace.hs.shape
    grad = torch.empty_like(trace.gates)
    g0, tc0, dhs0, d0 = (x.data_ptr() for x in (trace.gates, trace.tanh_cs, dhs, grad))
    solid = [_solid(p) for p in peephole]
    diagonals = [_address(p) for p in solid]
    cells = _Before(trace.cs, c0, steps, reverse)
    flow, all_d = StateGradient(dhs, dh0, steps, reverse), steps.cut(grad)
    width, dc0 = dc.shape[1], dc.data_ptr()
    for t in flow.backwards:
        b, at = steps.sizes[t], 4 * steps.offsets[t]
        before, stride = cells.at(t)
        kernel(
            H, b, N, stride, width, g0 + at, before, tc0 + at, dhs0 + at, dc0, d0 + at, *diagonals
        )
        flow.send(t, weight_t, all_d[t])
    return grad


class _Before:
    """Finds the cells before a step: address and distance between rows."""

    def __init__(self, cs: Tensor, c0: Tensor, steps: Steps, reverse: bool):
        self.cs, self.c0, self.steps = cs, c0.contiguous(), steps
        self._toward, self._end = (1, len(steps)) if reverse else (-1, -1)
        self._first = self.c0.data_ptr(), steps.batch
        self._cs, self._stride = cs.data_ptr(), cs.shape[1]
        self._joined: Tensor | None = None  # kept alive until the kernel has read it

    def at(self, t: int) -> tuple[int, int]:
        steps, p = self.steps, t + self._toward
        if p == self._end:
            return self._first
        start, have = steps.offsets[p], steps.sizes[p]
        if have >= steps.sizes[t]:
            return self._cs + 4 * start, self._stride
        self._joined = carry(self.cs[:, start : start + have], steps.sizes[t], self.c0)
        return self._joined.data_ptr(), steps.sizes[t]


def _kernels() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None, "ask usable() first"
    return loaded
