"""Compiles C into a shared library and keeps it in the user's cache directory.

What is loaded from there runs as the user, so only what the user alone could have put there is
taken: a regular file in a folder, both theirs and closed to the writing of others. The name says
what it was made from and the hash of what it holds; a file that is damaged or cut off is made
again instead of being loaded.
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

_SECONDS = 300
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Source(NamedTuple):
    """A C file, and flags for it alone."""

    path: Path
    flags: tuple[str, ...] = ()


def library(
    name: str, sources: Sequence[Source], flags: Sequence[str], headers: Sequence[Path] = ()
) -> Path | None:
    """The library of these sources, built or found; None where there is none to be had.

    Every source becomes an object with `flags` and its own, and all are linked with `flags`.
    `headers` are not compiled, but what is built depends on them. `CC` names the compiler.
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
        return None  # optional in every way: no room, no permission, a compiler too old, …


def found_compiler() -> list[str] | None:
    """The command that compiles; `CC` may hold several words, `ccache gcc` for one."""
    if "CC" in os.environ:
        try:
            words = shlex.split(os.environ["CC"])
        except ValueError:  # a quote that does not end
            return None
        return words if words and shutil.which(words[0]) else None
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return None if found is None else [found]


def _key(
    compiler: Sequence[str],
    sources: Sequence[Source],
    flags: Sequence[str],
    headers: Sequence[Path],
) -> str:
    """Stands for all that decides what is built."""
    parts = [*compiler, *flags, platform.machine(), cpu_features()]
    key = hashlib.sha256(repr([parts, [source.flags for source in sources]]).encode())
    for path in (*(source.path for source in sources), *headers):
        key.update(hashlib.sha256(path.read_bytes()).digest())
    return key.hexdigest()[:16]


def cpu_features() -> str:
    """A cache directory may be shared between machines, code for the wrong CPU may not."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    lines = info.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def open_to_others(folder: Path) -> Path | None:
    """The first of the folder and those above it that somebody else could put files into.

    Above it, sticky directories as /tmp are fine: what is ours there cannot be replaced.
    """
    if not hasattr(os, "geteuid"):
        return None
    own = os.geteuid()
    state = folder.lstat()
    if stat.S_ISLNK(state.st_mode) or state.st_uid != own or state.st_mode & _OTHERS:
        return folder
    for parent in folder.resolve().parents:
        state = parent.stat()
        sticky = state.st_mode & stat.S_ISVTX
        if state.st_uid not in (0, own) or (state.st_mode & _OTHERS and not sticky):
            return parent
    return None


def _kept(folder: Path, stem: str) -> Path | None:
    """What was built before, if it still is what was built; anything else goes."""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        if ours(path) and path.stem == f"{stem}-{_digest(path)}":
            return path
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return None


def ours(path: Path) -> bool:
    state = path.lstat()
    own = not hasattr(os, "geteuid") or state.st_uid == os.geteuid()
    return stat.S_ISREG(state.st_mode) and own and not state.st_mode & _OTHERS


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
    seconds: float = _SECONDS,
) -> None:
    """A shared library of these sources, objects beside it on the way."""
    objects = [str(path.with_name(f"{path.stem}.{n}.o")) for n in range(len(sources))]
    for source, target in zip(sources, objects, strict=True):
        _run([*compiler, *flags, *source.flags, "-c", str(source.path), "-o", target], seconds)
    _run([*compiler, *flags, "-shared", *objects, "-o", str(path), "-lm"], seconds)


def _run(command: list[str], seconds: float) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=seconds)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
