"""What happens to a training process: full disks, lost permissions, company, jumping clocks."""

import json
import resource
import time
from collections.abc import Callable
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


@pytest.mark.parametrize("mishap", ["replaced", "full"])
def test_a_directory_that_cannot_be_written(
    mishap: str, tiny_frame: LanguageConfig, whole: Path, tmp_path: Path
) -> None:
    """Another file is in its place; or no file may grow beyond a few bytes."""
    out, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def happens() -> None:
        if mishap == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        else:
            out.rename(elsewhere)
            out.touch()

    try:
        with pytest.raises(UserError, match="cannot be written"), after_updates({45: happens}):
            run_tiny(tiny_frame, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if mishap == "replaced":
        out.unlink()
        elsewhere.rename(out)
    resumes(tiny_frame, out, whole)


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
