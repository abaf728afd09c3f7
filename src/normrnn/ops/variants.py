"""The kernels' source and the instruction sets it is compiled for; no torch, for whoever builds a
wheel."""

import hashlib
import platform
from pathlib import Path

FOLDER = Path(__file__).with_name("kernels")
SOURCE = FOLDER / "recurrence.c"
HEADERS = tuple(sorted(FOLDER.glob("*.h")))
# Fused multiply-add, and no errno or floating-point traps to preserve; NaN keeps its meaning.
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-Wno-psabi"]
FLAGS += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
_AVX512 = ("-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mavx2", "-mfma")
VARIANTS = {
    "avx512": _AVX512,
    "narrow": (*_AVX512, "-DNARROW"),
    "avx2": ("-mavx2", "-mfma"),
    "baseline": (),
}
"""The same source for what a CPU can do, best first; the last runs everywhere. The second is for
few units, on CPUs that do 512 bits in two halves."""
NEEDS = {
    name: {flag.removeprefix("-m") for flag in flags if flag.startswith("-m")}
    for name, flags in VARIANTS.items()
}


def flags(variant: str) -> tuple[str, ...]:
    """Those of one variant, on top of FLAGS."""
    return (*VARIANTS[variant], f"-DVARIANT={variant}")


def is_x86() -> bool:
    """Whether there is more than the baseline: other processors have their vectors by default."""
    return platform.machine() in ("x86_64", "AMD64")


def packaged(variant: str) -> Path:
    """Where a wheel has it. The name stands for the source: another one has to be compiled."""
    key = hashlib.sha256(repr([FLAGS, flags(variant)]).encode())
    for path in (SOURCE, *HEADERS):
        key.update(hashlib.sha256(path.read_bytes()).digest())
    return FOLDER / f"{variant}-{key.hexdigest()[:16]}.so"
