"""Processes of this one: cores it may use, threads it gives, and its end."""

import json
import os
import sys
from pathlib import Path

import pytest

from normrnn.experiments import jobs
from normrnn.experiments.compare import compare
from normrnn.processes import Child, stop, usable_cores
from normrnn.text.config import LanguageConfig


def test_a_comparison_starts_as_many_processes_as_it_may(
    tiny: LanguageConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)), raising=False)
    assert usable_cores() == 3
    limits: list[int] = []

    def record(_jobs: object, limit: int, _console: object) -> None:
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
    assert json.loads(child.last_words()) == ["order", ["a"], ["2", "2"]]


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
    assert (failed.code, failed.last_words()) == (1, "no such thing")
    silent = Child("waits", [], b"", tmp_path / "other.txt")
    silent._process.kill()
    silent.wait()
    assert silent.last_words() == "was ended by signal 9"
    stop([silent])
