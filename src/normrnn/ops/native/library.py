"""Load the compiled kernels and connect them to torch's OpenMP threads."""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from normrnn.ops.backend import choice
from normrnn.ops.native import build

_NO_MEMORY = "not enough memory for a compiled kernel: use a smaller batch or shorter sequences"


class Library:
    """The functions of one variant.

    ``forward``, ``backward`` and ``kept_floats`` take packed arguments, see `arguments.h`, of
    ``arguments_size`` bytes.
    """

    def __init__(self, path: Path, variant: str):
        self.path, self.variant = path, variant
        loaded = ctypes.CDLL(str(path))
        pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        packed, status = ctypes.c_char_p, ctypes.c_int

        def function(name: str, *arguments: Any, result: Any = None, failure: Any = None) -> Any:
            found = getattr(loaded, f"normrnn_{name}_{variant}")
            found.argtypes, found.restype = arguments, result
            if failure is not None:
                found.errcheck = _raise_on(failure)
            return found

        # Called for every layer, so without errcheck: a Python call less.
        self.forward = function("forward", packed, result=status)
        self.backward = function("backward", packed, result=status)
        self.kept_floats = function("kept_floats", packed, result=size)
        update = [*[size] * 4, *[pointer] * 4, real, *[pointer] * 2]
        self.update = function("update", *update, result=status)
        classify = [*[size] * 4, *[pointer] * 8]
        self.classify = function("classify", *classify, result=size, failure=-1)
        self.arguments_size: int = function("arguments_size", result=status)()
        self.threaded = _openmp() is not None
        function("threads", *[pointer] * 3)(*(_openmp() or (None,) * 3))


def out_of_memory() -> MemoryError:
    return MemoryError(_NO_MEMORY)


def _raise_on(failure: int) -> Any:
    def check(result: int, *_: Any) -> int:
        if result == failure:
            raise out_of_memory()
        return result

    return check


@cache
def library() -> Library | None:
    """Load the best variant for this CPU; None where there is none.

    ``NORMRNN_NATIVE=0`` turns the kernels off.
    """
    if os.environ.get("NORMRNN_NATIVE", "1") == "0":
        return None
    variant = best_variant()
    path: Path | None = build.packaged(variant)  # as trusted as the code beside it
    if path is None or not path.is_file():
        source = build.Source(build.SOURCE, build.variant_flags(variant))
        path = build.library("recurrence", [source], build.FLAGS, build.HEADERS)
    try:
        return None if path is None else Library(path, variant)
    except (OSError, AttributeError):
        return None  # the kernels are optional


def best_variant() -> str:
    """Name the best variant that this CPU can run."""
    if not build.is_x86():
        return "baseline"
    features = set(build.cpu_features().split())
    return next(name for name in build.VARIANTS if features >= build.NEEDS[name])


def describe() -> dict[str, Any]:
    """Describe the kernels for the record of a run: other kernels round differently."""
    loaded, chosen = library(), {}
    if choice.selected != "auto":
        chosen = {"backend": choice.selected}
    if loaded is None:
        return {"kernels": "torch", **chosen}
    found = {"kernels": loaded.variant, "build": loaded.path.stem, "threads": loaded.threaded}
    return found | chosen


@cache
def _openmp() -> tuple[int, int, int] | None:
    """Addresses of functions of torch's OpenMP runtime; a second runtime would compete with it."""
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
