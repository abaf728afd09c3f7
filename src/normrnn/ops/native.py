"""An optional C kernel for the element-wise half of an LSTM step.

It is compiled with the system's C compiler when it is first wanted, kept in the user's cache
directory, and called through ctypes. Without a compiler, or with ``NORMRNN_NATIVE=0``, the same
numbers come from torch's own kernels; see ``benchmarks/NOTES.md`` for what it pays.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from normrnn.ops.cells import LSTMTrace, Peephole, StateGradient, carry
from normrnn.ops.steps import Steps

_SOURCE = Path(__file__).with_name("lstm_step.c")
_FLAGS = ["-O3", "-std=c99", "-fPIC", "-shared", "-march=native", "-funroll-loops"]
# Fused multiply-add, and no errno or floating-point traps to preserve; NaN keeps its meaning.
_FLAGS += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel, or None where there is none to be had."""
    if os.environ.get("NORMRNN_NATIVE", "1") == "0":
        return None
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    try:
        return _load(_compiled(compiler))
    except (OSError, subprocess.SubprocessError, AttributeError):
        return None


def usable(gates: Tensor) -> bool:
    """Whether the kernel can take these gates: float32 on a CPU."""
    return gates.dtype == torch.float32 and gates.device.type == "cpu" and library() is not None


def _compiled(compiler: str) -> Path:
    """Builds the library, or finds it built: the name says source, flags and kind of CPU."""
    key = hashlib.sha256(_SOURCE.read_bytes())
    for part in (*_FLAGS, compiler, platform.machine(), _cpu_features()):
        key.update(part.encode())
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "normrnn"
    target = folder / f"lstm_step-{key.hexdigest()[:16]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / "built.so"
            command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            built.replace(target)  # atomic: two processes may get here at once
    return target


def _cpu_features() -> str:
    """A cache directory may be shared between machines, code for the wrong CPU may not."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    lines = info.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    loaded.normrnn_lstm_forward.argtypes = [size] * 4 + [pointer] * 8
    loaded.normrnn_lstm_backward.argtypes = [size] * 5 + [pointer] * 9
    loaded.normrnn_lstm_forward.restype = loaded.normrnn_lstm_backward.restype = None
    return loaded


def lstm_forward(
    gates: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight: Tensor,
    peephole: Peephole,
    steps: Steps,
    reverse: bool,
) -> LSTMTrace:
    """As :func:`normrnn.ops.cells.lstm_forward`."""
    kernel = _kernels().normrnn_lstm_forward
    H, N = h0.shape[0], gates.shape[1]
    hs = gates.new_empty(H, N)
    cs, tanh_cs = torch.empty_like(hs), torch.empty_like(hs)
    bases = [gates.data_ptr(), cs.data_ptr(), tanh_cs.data_ptr(), hs.data_ptr()]
    diagonals = [None if p is None else p.data_ptr() for p in peephole]
    cells = _Before(cs, c0, steps, reverse)
    all_g, all_h, h = steps.cut(gates), steps.cut(hs), h0
    for t in steps.order(reverse):
        b, shift = steps.sizes[t], 4 * steps.offsets[t]
        all_g[t].addmm_(weight, carry(h, b, h0))
        before, stride = cells.at(t)
        g, c, tc, out = [base + shift for base in bases]
        kernel(H, b, N, stride, g, before, c, tc, out, *diagonals)
        h = all_h[t]
    return LSTMTrace(gates, cs, tanh_cs, hs)


def lstm_backward(
    dhs: Tensor,
    dc: Tensor,
    trace: LSTMTrace,
    h0: Tensor,
    c0: Tensor,
    weight_t: Tensor,
    peephole: Peephole,
    steps: Steps,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`normrnn.ops.cells.lstm_backward`."""
    kernel = _kernels().normrnn_lstm_backward
    H, N = trace.hs.shape
    grad = torch.empty_like(trace.gates)
    read = [trace.gates.data_ptr(), trace.tanh_cs.data_ptr(), dhs.data_ptr(), grad.data_ptr()]
    diagonals = [None if p is None else p.data_ptr() for p in peephole]
    cells = _Before(trace.cs, c0, steps, reverse)
    flow, all_d = StateGradient(dhs, h0, steps, reverse), steps.cut(grad)
    width, dc_base = dc.shape[1], dc.data_ptr()
    for t in flow.backwards:
        b, shift = steps.sizes[t], 4 * steps.offsets[t]
        before, stride = cells.at(t)
        g, tc, dh, d = [base + shift for base in read]
        kernel(H, b, N, stride, width, g, before, tc, dh, dc_base, d, *diagonals)
        flow.send(t, weight_t, all_d[t])
    return grad, flow.dh0, dc


class _Before:
    """Finds the cells before a step: address and distance between rows."""

    def __init__(self, cs: Tensor, c0: Tensor, steps: Steps, reverse: bool):
        self.cs, self.c0, self.steps = cs, c0.contiguous(), steps
        self._toward = 1 if reverse else -1
        self._joined: Tensor | None = None  # kept alive until the kernel has read it

    def at(self, t: int) -> tuple[int, int]:
        steps, p = self.steps, t + self._toward
        have = steps.sizes[p] if 0 <= p < len(steps.sizes) else 0
        if not have:
            return self.c0.data_ptr(), steps.batch
        start = steps.offsets[p]
        if have >= steps.sizes[t]:
            return self.cs.data_ptr() + 4 * start, self.cs.shape[1]
        self._joined = carry(self.cs[:, start : start + have], steps.sizes[t], self.c0)
        return self._joined.data_ptr(), steps.sizes[t]


def _kernels() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None, "ask usable() first"
    return loaded
