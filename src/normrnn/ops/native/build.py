"""Compile the C kernels into a shared library in the user's cache directory.

A library runs with the user's rights, so a file is loaded only if nobody else could have written
it: a regular file in a directory, both owned by the user and not writable by others. Its name
holds a hash of its source and a hash of its content; a damaged file is built again.

Imports no torch, so that `hatch_build.py` can use this file alone.
"""

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_TIMEOUT = 300
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
FOLDER = Path(__file__).parent
SOURCE = FOLDER / "recurrence.c"
HEADERS = tuple(sorted(FOLDER.glob("*.h")))
# Fused multiply-add, and no errno or floating-point traps to preserve; NaN keeps its meaning.
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-Wno-psabi"]
FLAGS += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
VARIANTS = {
    "avx512": ("-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mavx2", "-mfma"),
    "avx2": ("-mavx2", "-mfma"),
    "baseline": (),
}
"""Instruction sets that the source is compiled for, best first; the last runs everywhere."""
NEEDS = {name: {flag.removeprefix("-m") for flag in flags} for name, flags in VARIANTS.items()}


def variant_flags(variant: str) -> tuple[str, ...]:
    """Return the compiler flags of one variant, on top of FLAGS."""
    return (*VARIANTS[variant], f"-DVARIANT={variant}")


def is_x86() -> bool:
    """Whether there are variants: other processors have their vectors by default."""
    return platform.machine() in ("x86_64", "AMD64")


def packaged(variant: str) -> Path:
    """Return the path of a variant inside a wheel; the name holds a hash of the source."""
    key = hashlib.sha256(repr([FLAGS, variant_flags(variant)]).encode())
    for path in (SOURCE, *HEADERS):
        key.update(hashlib.sha256(path.read_bytes()).digest())
    return FOLDER / f"{variant}-{key.hexdigest()[:16]}.so"


class Source(NamedTuple):
    """A C file and its own compiler flags."""

    path: Path
    flags: tuple[str, ...] = ()


def library(
    name: str, sources: Sequence[Source], flags: Sequence[str], headers: Sequence[Path] = ()
) -> Path | None:
    """Find or build the library of these sources; None if that is not possible.

    Every source is compiled with `flags` and its own. `headers` only enter the name of the file.
    `CC` names the compiler.
    """
    compiler = found_compiler()
    if compiler is None:
        return None
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # neither HOME nor an entry in passwd
        return None
    folder = Path(base) / "normrnn"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (exposed := open_to_others(folder)) is not None:
            warnings.warn(
                f"others can write to {exposed}: nothing compiled is kept or taken from"
                f" {folder}, and normrnn computes without its C kernels",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        stem = f"{name}-{_key(compiler, sources, flags, headers)}"
        return _kept(folder, stem) or _built(folder, stem, compiler, sources, flags)
    except (OSError, MemoryError, subprocess.SubprocessError):
        return None  # the kernels are optional: disk full, no permission, an old compiler, …


def found_compiler() -> list[str] | None:
    """Return the compiler command; `CC` may have several words, such as `ccache gcc`."""
    if "CC" in os.environ:
        try:
            words = shlex.split(os.environ["CC"])
        except ValueError:  # an unclosed quote
            return None
        return words if words and shutil.which(words[0]) else None
    path = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return None if path is None else [path]


def _key(
    compiler: Sequence[str],
    sources: Sequence[Source],
    flags: Sequence[str],
    headers: Sequence[Path],
) -> str:
    """Hash everything that determines the library."""
    parts = [*compiler, *flags, platform.machine(), cpu_features()]
    key = hashlib.sha256(repr([parts, [source.flags for source in sources]]).encode())
    for path in (*(source.path for source in sources), *headers):
        key.update(hashlib.sha256(path.read_bytes()).digest())
    return key.hexdigest()[:16]


def cpu_features() -> str:
    """Return the CPU's features: machines may share a cache directory, but not the code in it."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    lines = info.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def open_to_others(folder: Path) -> Path | None:
    """Return the first of the folder and its parents that other users can write to, or None.

    Sticky parents such as /tmp are safe: others cannot replace files in them.
    """
    if not hasattr(os, "geteuid"):
        return None
    user = os.geteuid()
    state = folder.lstat()
    if stat.S_ISLNK(state.st_mode) or state.st_uid != user or state.st_mode & _WRITABLE_BY_OTHERS:
        return folder
    for parent in folder.resolve().parents:
        state = parent.stat()
        sticky = state.st_mode & stat.S_ISVTX
        if state.st_uid not in (0, user) or (state.st_mode & _WRITABLE_BY_OTHERS and not sticky):
            return parent
    return None


def _kept(folder: Path, stem: str) -> Path | None:
    """Return the cached library if it is intact; delete it otherwise."""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        if ours(path) and path.stem == f"{stem}-{_digest(path)}":
            return path
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return None


def ours(path: Path) -> bool:
    """Whether a file is regular, owned by the user and not writable by others."""
    state = path.lstat()
    is_owner = not hasattr(os, "geteuid") or state.st_uid == os.geteuid()
    return stat.S_ISREG(state.st_mode) and is_owner and not state.st_mode & _WRITABLE_BY_OTHERS


def _built(
    folder: Path, stem: str, compiler: list[str], sources: Sequence[Source], flags: Sequence[str]
) -> Path:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / "built.so"
        compile_to(built, compiler, sources, flags)
        built.chmod(0o700)
        # Atomic: two processes may get here at once.
        return built.replace(folder / f"{stem}-{_digest(built)}.so")


def compile_to(
    path: Path,
    compiler: Sequence[str],
    sources: Sequence[Source],
    flags: Sequence[str],
    seconds: float = _TIMEOUT,
) -> None:
    """Compile and link a shared library, with object files beside it."""
    objects = [str(path.with_name(f"{path.stem}.{n}.o")) for n in range(len(sources))]
    for source, target in zip(sources, objects, strict=True):
        _run([*compiler, *flags, *source.flags, "-c", str(source.path), "-o", target], seconds)
    _run([*compiler, *flags, "-shared", *objects, "-o", str(path), "-lm"], seconds)


def _run(command: list[str], seconds: float) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=seconds)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
