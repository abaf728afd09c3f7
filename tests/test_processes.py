"""Processes: cores, threads and ends of children; one lock for all, through no symbolic link."""

import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from normrnn.experiments import jobs
from normrnn.experiments.compare import compare
from normrnn.files import exclusive, is_held
from normrnn.processes import Child, stop, usable_cores
from normrnn.text.config import LanguageConfig


def test_a_comparison_starts_as_many_processes_as_it_may(
    tiny: LanguageConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)), raising=False)
    assert usable_cores() == 3
    limits: list[int] = []

    def record(_jobs: object, limit: int) -> None:
        limits.append(limit)
        raise InterruptedError

    monkeypatch.setattr(jobs, "run_jobs", record)
    with pytest.raises(InterruptedError):
        compare(tiny, norms=["none"], out=tmp_path / "out")
    assert limits == [3]


def test_a_child_has_the_threads_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment says: who starts several processes shares the cores out."""
    (tmp_path / "shows.py").write_text(
        "import json, os, sys\n"
        "names = ('OMP_NUM_THREADS', 'MKL_NUM_THREADS')\n"
        "print(json.dumps([sys.stdin.read(), sys.argv[1:], [os.environ[n] for n in names]]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    child = Child("shows", ["a"], b"order", tmp_path / "log" / "log.txt", threads=2)
    child.wait()
    assert child.code == 0
    assert json.loads(child.failure_reason()) == ["order", ["a"], ["2", "2"]]


def test_last_output_is_of_this_process_and_signals_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "fails.py").write_text("raise SystemExit('normrnn: no such thing')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    log = tmp_path / "log.txt"
    log.write_text("what was said before\n")
    failed = Child("fails", [], b"", log)
    failed.wait()
    assert (failed.code, failed.failure_reason()) == (1, "no such thing")
    silent = Child("waits", [], b"", tmp_path / "other.txt")
    silent._process.kill()
    silent.wait()
    assert silent.failure_reason() == "was ended by signal 9"
    stop([silent])


HOLD = (
    "import sys, pathlib; from normrnn.files import exclusive\n"
    "with exclusive(pathlib.Path(sys.argv[1]), RuntimeError()):\n"
    "    print(True, flush=True)\n"
    "    sys.stdin.read()\n"
)


def test_one_process_at_a_time_until_it_ends(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert is_held(path)
        with pytest.raises(RuntimeError, match="busy"), exclusive(path, RuntimeError("busy")):
            pass
        other.kill()
        other.wait()
    assert not is_held(path)
    with exclusive(path, RuntimeError("busy")):
        assert is_held(path)
    assert not is_held(path)


def test_no_link_is_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    (tmp_path / ".lock").symlink_to(target)
    for content in (None, "kept"):
        if content:
            target.write_text(content)
        lock = exclusive(tmp_path / ".lock", RuntimeError("busy"))
        with pytest.raises(OSError, match="symbolic links"), lock:
            pass
        assert (target.read_text() if target.exists() else None) == content


def test_is_held_does_not_block_others(tmp_path: Path) -> None:
    """Asking holds the file shared for a moment; whoever wants it waits that long."""
    path = tmp_path / ".lock"
    path.touch()
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        release = threading.Timer(0.05, fcntl.flock, (file, fcntl.LOCK_UN))
        release.start()
        with exclusive(path, RuntimeError("busy")):
            assert is_held(path)
        release.join()
