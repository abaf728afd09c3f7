"""The cache of compiled code: only what is ours and whole is loaded."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from normrnn.ops.native import build

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler here")
FLAGS = ["-O1", "-fPIC"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "normrnn"


@pytest.fixture
def sources(tmp_path: Path) -> list[build.Source]:
    (tmp_path / "one.c").write_text("int two(void); int one(void) { return 1 + two(); }\n")
    (tmp_path / "two.c").write_text("int two(void) { return TWO; }\n")
    return [
        build.Source(tmp_path / "one.c"),
        build.Source(tmp_path / "two.c", ("-DTWO=2",)),
    ]


def built(sources: list[build.Source], flags: list[str] = FLAGS) -> Path:
    path = build.library("some", sources, flags)
    assert path is not None
    return path


def call(path: Path) -> int:
    return ctypes.CDLL(str(path)).one()


def test_several_files_with_flags_of_their_own(cache: Path, sources: list[build.Source]) -> None:
    path = built(sources)
    assert call(path) == 3
    assert path.parent == cache
    assert [p.name for p in cache.iterdir()] == [path.name]
    stamp = path.stat().st_mtime_ns
    assert built(sources) == path
    assert path.stat().st_mtime_ns == stamp
    other = built([sources[0], build.Source(sources[1].path, ("-DTWO=3",))])
    assert call(other) == 4


@pytest.mark.usefixtures("cache")
def test_another_source_header_or_flag_is_another_library(
    sources: list[build.Source], tmp_path: Path
) -> None:
    header = tmp_path / "some.h"
    header.write_text("/* one */\n")
    found = [built(sources), built(sources, [*FLAGS, "-g"])]
    for text in ("/* one */\n", "/* two */\n"):
        header.write_text(text)
        found.append(build.library("some", sources, FLAGS, [header]) or Path())
    sources[0].path.write_text("int two(void); int one(void) { return 5 + two(); }\n")
    found.append(built(sources))
    assert len({path.name.split("-")[1] for path in found}) == 5
    assert call(found[-1]) == 7


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "damage", ["truncated", "flipped", "empty", "planted", "link", "mode", "folder"]
)
def test_what_is_not_what_was_built_is_built_again(
    sources: list[build.Source], damage: str, tmp_path: Path
) -> None:
    path = built(sources)
    good = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(good[: len(good) // 2])
    elif damage == "flipped":
        path.write_bytes(good[:-100] + bytes([good[-100] ^ 1]) + good[-99:])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "planted":
        (tmp_path / "evil.c").write_text("int one(void) { return 666; }\n")
        subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "evil.c", "-o", path], check=True)
    elif damage == "link":
        shutil.move(path, tmp_path / "elsewhere.so")
        path.symlink_to(tmp_path / "elsewhere.so")
    elif damage == "folder":
        path.unlink()
        (path / "inside").mkdir(parents=True)
    else:
        path.chmod(0o777)
    again = built(sources)
    assert again.read_bytes() == good
    assert not again.is_symlink()
    assert stat.S_IMODE(again.stat().st_mode) & 0o022 == 0
    # Loaded elsewhere: a library of that name may be open here.
    code = f"import ctypes; print(ctypes.CDLL({str(again)!r}).one())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "3\n"


@pytest.mark.parametrize("which", ["the folder", "the one above"])
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_cache_that_others_can_write_to_is_not_used(
    cache: Path, sources: list[build.Source], which: str, mode: int
) -> None:
    cache.mkdir(parents=True)
    shared = cache if which == "the folder" else cache.parent
    shared.chmod(mode)
    with pytest.warns(RuntimeWarning, match=f"others can write to {shared}:"):
        assert build.library("some", sources, FLAGS) is None
    assert list(cache.iterdir()) == []
    shared.chmod(0o1777 if shared == cache.parent else 0o700)  # as /tmp is
    assert build.library("some", sources, FLAGS) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_cache_of_somebody_else_is_not_used(cache: Path, sources: list[build.Source]) -> None:
    path = built(sources)
    os.chown(path, 65534, -1)
    assert built(sources).stat().st_uid == 0
    os.chown(cache, 65534, -1)
    with pytest.warns(RuntimeWarning, match="others can write to"):
        assert build.library("some", sources, FLAGS) is None


def test_a_cache_that_is_a_link_is_not_used(
    cache: Path, sources: list[build.Source], tmp_path: Path
) -> None:
    cache.parent.mkdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match="others can write to"):
        assert build.library("some", sources, FLAGS) is None


@pytest.mark.usefixtures("cache")
def test_a_compiler_of_several_words(
    sources: list[build.Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = tmp_path / "a wrapper"
    wrapper.write_text(f'#!/bin/sh\necho used >> "{tmp_path}/log"\nexec "$@"\n')
    wrapper.chmod(0o700)
    monkeypatch.setenv("CC", f"'{wrapper}' gcc")
    assert call(built(sources)) == 3
    assert (tmp_path / "log").read_text() == "used\n" * 3
    for nonsense in ("", "'", "no-such-compiler gcc"):
        monkeypatch.setenv("CC", nonsense)
        assert build.library("some", sources, FLAGS) is None


def test_a_cut_off_kernel_does_not_kill_the_process(
    sources: list[build.Source], tmp_path: Path
) -> None:
    """The loader maps what the file's tables promise: reading behind its end is a SIGBUS."""
    env = dict(os.environ, XDG_CACHE_HOME=str(tmp_path))
    parts = [f"build.Source(Path({str(s.path)!r}), {s.flags!r})" for s in sources]
    code = (
        "import ctypes; from pathlib import Path; from normrnn.ops.native import build; "
        f"path = build.library('some', [{', '.join(parts)}], {FLAGS!r}); "
        "print(ctypes.CDLL(path).one() == 3)"
    )
    for turn in range(2):
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
        if turn == 0:
            (path,) = (tmp_path / "normrnn").glob("*.so")
            os.truncate(path, path.stat().st_size // 2)


def test_without_a_home_nothing_is_built(
    sources: list[build.Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No HOME, no entry in passwd, as in some containers."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert build.library("some", sources, FLAGS) is None
