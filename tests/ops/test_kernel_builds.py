"""The kernels' source: compilers and instruction sets, and what Python and C must agree about."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from normrnn.ops.native import build, library
from normrnn.ops.native.kernel import LAYOUT
from tests.kernel_cases import Case, check_against_float64, pairs

STRICT = ["-Wall", "-Wextra", "-Werror"]
X86 = platform.machine() in ("x86_64", "AMD64")
CAN = set(build.cpu_features().split())


@pytest.mark.skipif(
    build.found_compiler() is None or os.environ.get("NORMRNN_NATIVE") == "0",
    reason="no compiler here, or not to be used",
)
def test_there_are_kernels_where_there_is_a_compiler() -> None:
    """Without them the tests of kernels are skipped: here it shows that they do not compile."""
    assert library.describe()["kernels"] == library.best_variant()


@pytest.mark.skipif(library.describe()["kernels"] == "torch", reason="no kernels here")
def test_python_and_c_agree_about_arguments() -> None:
    loaded = library.library()
    assert loaded is not None
    assert loaded.arguments_size == LAYOUT.size


ARM_HEADERS = Path("/usr/aarch64-linux-gnu/include")
ARM = ["-DVARIANT=baseline", "-isystem", str(ARM_HEADERS)]
TARGETS = [([c], build.variant_flags(v)) for c in ("gcc", "clang") for v in build.VARIANTS if X86]
TARGETS += [(["aarch64-linux-gnu-gcc"], ARM), (["clang", "--target=aarch64-linux-gnu"], ARM)]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "flags"), TARGETS)
def test_no_warnings(command: list[str], flags: list[str], tmp_path: Path) -> None:
    if not shutil.which(command[0]) or (flags == ARM and not ARM_HEADERS.is_dir()):
        pytest.skip(f"{command[0]} or its headers are not installed here")
    words = [*command, *build.FLAGS, *STRICT, *flags, "-c", str(build.SOURCE)]
    done = subprocess.run([*words, "-o", str(tmp_path / "it.o")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("variant", build.VARIANTS)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_every_variant_computes_the_same(
    compiler: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed here")
    if not build.NEEDS[variant] <= CAN:
        pytest.skip(f"this CPU cannot run {variant}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(library, "best_variant", lambda: variant)
    library.library.cache_clear()
    try:
        assert library.describe()["kernels"] == variant
        for mode, norm in pairs("RNN_TANH", "RNN_RELU", "LSTM", "GRU"):
            for hidden in (5, 16, 37):
                sizes = (9, 9, 7, 5, 5, 1)
                check_against_float64(
                    Case(mode, norm, sizes, (False, True), 21, hidden, peephole="ifo")
                )
    finally:
        library.library.cache_clear()


@pytest.mark.skipif(library.describe()["kernels"] == "torch", reason="no kernels here")
def test_what_a_wheel_brings_is_taken_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = library.library()
    assert loaded is not None
    brought = Path(shutil.copy(loaded.path, tmp_path / build.packaged(loaded.variant).name))
    monkeypatch.setattr(build, "packaged", lambda _: brought)
    monkeypatch.setattr(library, "best_variant", lambda: loaded.variant)
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.library.cache_clear()
    try:
        again = library.library()
        assert again is not None
        assert again.path == brought
        assert not (tmp_path / "cache").exists()
    finally:
        library.library.cache_clear()
