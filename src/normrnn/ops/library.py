"""The compiled kernels: found or built, loaded, and tied to torch's own threads."""

import ctypes
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normrnn.ops import build
from normrnn.ops.variants import (
    FLAGS,
    HEADERS,
    NEEDS,
    SOURCE,
    VARIANTS,
    flags,
    is_x86,
    packaged,
)

_HUGE = 1 << 20
"""Floats from which on a buffer is worth asking for large pages."""
_MADV_HUGEPAGE = 14
_NO_MEMORY = "not enough memory for a compiled kernel: use a smaller batch or shorter sequences"


class Library:
    """Entries of one variant. ``vector``: floats of a vector; ``job``: bytes of a job."""

    def __init__(self, path: Path, variant: str):
        self.path, self.variant = path, variant
        loaded = ctypes.CDLL(str(path))
        pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

        def entry(name: str, *arguments: Any, result: Any = None) -> Any:
            function = getattr(loaded, f"normrnn_{name}_{variant}")
            function.argtypes, function.restype = arguments, result
            return function

        self._forward = entry("forward", ctypes.c_char_p, result=ctypes.c_int)
        self._backward = entry("backward", ctypes.c_char_p, result=ctypes.c_int)
        update = [*[size] * 4, *[pointer] * 4, real, *[pointer] * 2]
        self.update = entry("update", *update, result=ctypes.c_int)
        self._classify = entry("classify", ctypes.c_char_p, pointer, pointer, result=size)
        word = ctypes.c_uint32
        self.drop = entry("drop", *[size] * 2, *[word] * 3, real, *[pointer] * 3)
        self.vector: int = entry("vector_width", result=ctypes.c_int)()
        self.job: int = entry("job_size", result=ctypes.c_int)()
        self.threaded = _runtime() is not None
        entry("threads", *[pointer] * 3)(*(_runtime() or (None,) * 3))

    def forward(self, job: bytes) -> None:
        if self._forward(job):
            raise MemoryError(_NO_MEMORY)

    def backward(self, job: bytes) -> None:
        if self._backward(job):
            raise MemoryError(_NO_MEMORY)

    def classify(self, job: bytes, targets: int, nats: int) -> int:
        """The number of errors."""
        errors = self._classify(job, targets, nats)
        if errors < 0:
            raise MemoryError(_NO_MEMORY)
        return errors

    def widths(self, mode: int, hidden: int) -> tuple[int, int]:
        """Floats of a packed row, and vectors of units; `kernels/product.h` lays them out."""
        gates, together = (1, 1, 4, 3)[mode], 2 if mode < 2 else 1
        panels = -(-hidden // (together * self.vector))
        return panels * together * gates * self.vector, -(-hidden // self.vector)


@cache
def library(hidden: int = 0) -> Library | None:
    """The best variant for this CPU and so many units, or None where there is none to be had."""
    if os.environ.get("NORMRNN_NATIVE", "1") == "0":
        return None
    best = _loaded(best_variant())
    if best is None or best.variant != "avx512" or not _in_halves():
        return best
    wide, narrow = (-(-hidden // floats) for floats in (16, 8))
    return (2 * wide > 1.03 * narrow and _loaded("narrow")) or best


@cache
def _loaded(variant: str) -> Library | None:
    path = packaged(variant)  # as trusted as the code beside it
    if not path.is_file():
        path = build.library("recurrence", [build.Source(SOURCE, flags(variant))], FLAGS, HEADERS)
    try:
        return None if path is None else Library(path, variant)
    except (OSError, AttributeError):
        return None  # optional in every way


def best_variant() -> str:
    """By what this CPU can do; other processors than x86-64 have their vectors by default."""
    if not is_x86():
        return "baseline"
    can = set(build.cpu_features().split())
    return next(name for name in VARIANTS if can >= NEEDS[name])


def _in_halves() -> bool:
    """Whether two vectors of 8 floats take no longer than one of 16: AMD's family 25, Zen 4."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines()[:8] if info.exists() else []
    words = {tuple(map(str.strip, line.split(":", 1))) for line in lines}
    return words >= {("vendor_id", "AuthenticAMD"), ("cpu family", "25")}


def describe() -> dict[str, Any]:
    """What computes, for the record: other kernels give other last bits."""
    loaded = library()
    if loaded is None:
        return {"kernels": "torch"}
    return {"kernels": loaded.variant, "build": loaded.path.stem, "threads": loaded.threaded}


@cache
def _runtime() -> tuple[int, int, int] | None:
    """The entries of torch's OpenMP runtime: its threads are shared, a second one would fight."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libgomp.so.1", "libiomp5.so", "libomp.dylib"):
        found = next(folder.glob(f"{name.split('.')[0]}*{Path(name).suffix}*"), None)
        if found is None:
            continue
        try:
            runtime = ctypes.CDLL(str(found))
            names = "GOMP_parallel", "omp_get_num_threads", "omp_get_thread_num"
            addresses = [ctypes.cast(getattr(runtime, n), ctypes.c_void_p).value for n in names]
        except (OSError, AttributeError):
            continue
        return tuple(address or 0 for address in addresses)  # type: ignore[return-value]
    return None


def floats(*shape: int) -> Tensor:
    """Memory for a kernel, whatever the user's default type and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def room(count: int) -> Tensor:
    """The same; of large pages where it is large, since every call asks for it anew."""
    buffer = floats(count)
    if count >= _HUGE and (advise := _madvise()) is not None:
        start = -(-buffer.data_ptr() // 4096) * 4096
        size = (buffer.data_ptr() + 4 * count - start) // 4096 * 4096
        advise(start, size, _MADV_HUGEPAGE)
    return buffer


@cache
def _madvise() -> Any:
    """Linux's, or None."""
    if platform.system() != "Linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
