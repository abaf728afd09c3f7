"""What happens to a training process: full disks, lost permissions, company, jumping clocks."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from normrnn.errors import UserError
from normrnn.reporting.runs import examine
from normrnn.runs.store import RunDirectory
from normrnn.text.config import LanguageConfig
from tests.tiny_runs import after_updates, rows_of, run_tiny

DAY = 86_400.0


def resumes(config: LanguageConfig, out: Path, whole: Path) -> None:
    """What was saved is good, and the run ends as if nothing had happened."""
    saved = examine(out)
    assert not saved.problem
    assert 0 < len(saved.rows) < len(rows_of(whole))
    assert any("resuming" in said for said in run_tiny(config, out))
    assert rows_of(out) == rows_of(whole)
    assert not list(out.glob(".*.tmp"))


def test_a_directory_that_is_replaced(
    tiny_frame: LanguageConfig, whole: Path, tmp_path: Path
) -> None:
    out, elsewhere = tmp_path / "run", tmp_path / "elsewhere"

    def replaced() -> None:
        out.rename(elsewhere)
        out.touch()

    with pytest.raises(UserError, match="cannot be written"), after_updates({45: replaced}):
        run_tiny(tiny_frame, out)
    out.unlink()
    elsewhere.rename(out)
    resumes(tiny_frame, out, whole)


LIMITED = """
import resource, sys
from pathlib import Path
from normrnn.cli import guarded
from normrnn.engine.loop import train
from tests.tiny_runs import after_updates, tiny_config
from dataclasses import replace

limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
config = replace(tiny_config(Path(sys.argv[1])), norm="frame", threads=1)
with after_updates({45: limit}):
    sys.exit(guarded(lambda _: train(config, Path(sys.argv[2])) or 0, []))
"""


def test_a_full_disk(
    tiny_frame: LanguageConfig, text_dir: Path, whole: Path, tmp_path: Path
) -> None:
    """No file may grow beyond a few bytes, in a process of its own."""
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(text_dir), str(out)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(f"normrnn: {out}")
    assert "cannot be written: File too large" in sentence
    resumes(replace(tiny_frame, threads=1), out, whole)


def test_a_second_process_changes_nothing(tiny_frame: LanguageConfig, stopped: Path) -> None:
    with RunDirectory(stopped).locked():
        before = {path.name: path.read_bytes() for path in stopped.iterdir()}
        with pytest.raises(UserError, match="another process is training"):
            run_tiny(tiny_frame, stopped)
        assert {path.name: path.read_bytes() for path in stopped.iterdir()} == before


def test_a_clock_that_jumps(
    tiny_frame: LanguageConfig, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day back, and then a year ahead."""
    out, now = tmp_path / "run", time.time

    def jump(days: float) -> Callable[[], None]:
        return lambda: monkeypatch.setattr("time.time", lambda: now() + days * DAY)

    with after_updates({45: jump(-1), 90: jump(365)}):
        run_tiny(tiny_frame, out, logs=["tensorboard"])
    assert rows_of(out) == rows_of(whole)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert seconds[-1] < 3600
    assert list((out / "tensorboard").glob("events.*"))
