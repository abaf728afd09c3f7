"""The cache of compiled code: only what is ours and whole is loaded."""

import ctypes
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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
    return [build.Source(tmp_path / "one.c"), build.Source(tmp_path / "two.c", ("-DTWO=2",))]


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
def test_a_compiler_of_several_words_or_none_and_no_home(
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
    monkeypatch.delenv("CC")
    monkeypatch.delenv("XDG_CACHE_HOME")  # and no HOME, no entry in passwd, as in some containers
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home directory")))
    assert build.library("some", sources, FLAGS) is None


def plant(path: Path, folder: Path) -> None:
    (folder / "evil.c").write_text("int one(void) { return 666; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", folder / "evil.c", "-o", path], check=True)


def link(path: Path, folder: Path) -> None:
    shutil.move(path, folder / "elsewhere.so")
    path.symlink_to(folder / "elsewhere.so")


def put_folder(path: Path, _: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def flip(path: Path, _: Path) -> None:
    good = path.read_bytes()
    path.write_bytes(good[:-100] + bytes([good[-100] ^ 1]) + good[-99:])


DAMAGES: dict[str, Callable[[Path, Path], Any]] = {
    # The loader maps what the file's tables promise: reading behind its end is a SIGBUS.
    "truncated": lambda path, _: os.truncate(path, path.stat().st_size // 2),
    "flipped": flip,
    "empty": lambda path, _: path.write_bytes(b""),
    "planted": plant,
    "link": link,
    "folder": put_folder,
    "mode": lambda path, _: path.chmod(0o777),
}
if os.geteuid() == 0:  # only root can give a file to another user
    DAMAGES["owner"] = lambda path, _: os.chown(path, 65534, -1)


@pytest.mark.usefixtures("cache")
def test_a_changed_library_is_built_again(sources: list[build.Source], tmp_path: Path) -> None:
    path = built(sources)
    good = path.read_bytes()
    for name, damage in DAMAGES.items():
        damage(path, tmp_path)
        assert built(sources) == path
        assert path.read_bytes() == good, name
        assert not path.is_symlink()
        mode = path.stat()
        assert (mode.st_uid, stat.S_IMODE(mode.st_mode) & 0o022) == (os.geteuid(), 0), name
    assert call(path) == 3


FOLDERS: dict[str, Callable[[Path], Any]] = {
    "the folder, all": lambda cache: cache.chmod(0o777),
    "the folder, group": lambda cache: cache.chmod(0o775),
    "the one above, all": lambda cache: cache.parent.chmod(0o777),
    "the one above, group": lambda cache: cache.parent.chmod(0o775),
    "a link": lambda cache: cache.symlink_to(cache.rename(cache.parent / "other")),
}
if os.geteuid() == 0:
    FOLDERS["another owner"] = lambda cache: os.chown(cache, 65534, -1)


@pytest.mark.parametrize("change", FOLDERS)
def test_a_folder_that_others_can_write_to_is_not_used(
    cache: Path, sources: list[build.Source], change: str
) -> None:
    cache.mkdir(parents=True)
    FOLDERS[change](cache)
    with pytest.warns(RuntimeWarning, match=str(cache.parent)):
        assert build.library("some", sources, FLAGS) is None
    assert list(cache.iterdir()) == []


def test_a_sticky_folder_above_is_used(cache: Path, sources: list[build.Source]) -> None:
    """As /tmp is."""
    cache.mkdir(parents=True)
    cache.parent.chmod(0o1777)
    assert built(sources).parent == cache
