"""What happens to processes: full disks, lost permissions, company, jumping clocks."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from normrnn.engine.callbacks import TENSORBOARD
from normrnn.reporting.runs import examine
from tests.mishaps import config
from tests.tiny_runs import rows_of, run_tiny


def started(what: str, out: Path, data: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.mishaps", what, str(out), str(data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate()
    assert "Traceback" not in out + err
    assert "unexpected error" not in err
    return process.returncode, out, err


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, bool]]:
    """A directory, and whether it is a small disk of its own, which takes the right to mount."""
    out = tmp_path / "disk"
    out.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(out)]
    mounted = subprocess.run(mounting, capture_output=True).returncode == 0
    yield out, mounted
    if mounted:
        subprocess.run(["umount", str(out)], check=True)


@pytest.fixture
def expected(text_dir: Path, tmp_path: Path) -> list[dict]:
    """The rows of a run to which nothing happens."""
    run_tiny(config(text_dir), tmp_path / "undisturbed")
    return rows_of(tmp_path / "undisturbed")


def goes_on(out: Path, text_dir: Path, expected: list[dict]) -> None:
    """What was saved is good, and the same command ends as if nothing had happened."""
    found = examine(out)
    assert found.run is not None
    assert not found.problem
    assert 0 < len(found.run.rows) < len(expected)
    code, said, err = ended(started("nothing", out, text_dir))
    assert code == 0, err
    assert "resuming" in said
    assert rows_of(out) == expected
    assert not list(out.glob(".*.tmp"))


def test_a_full_disk(disk: tuple[Path, bool], text_dir: Path, expected: list[dict]) -> None:
    out, mounted = disk
    code, _, err = ended(started("full" if mounted else "limit", out, text_dir))
    assert code == 1
    (sentence,) = err.splitlines()
    assert sentence.startswith(f"normrnn: {out}")
    assert "cannot be written: " + ("No space left" if mounted else "File too large") in sentence
    (out / "filler").unlink(missing_ok=True)
    goes_on(out, text_dir, expected)


def test_a_directory_that_becomes_read_only(
    disk: tuple[Path, bool], text_dir: Path, expected: list[dict]
) -> None:
    out, mounted = disk
    what = "remount" if mounted else "chmod" if os.geteuid() else "replace"
    code, _, err = ended(started(what, out, text_dir))
    assert code == 1
    (sentence,) = err.splitlines()
    assert "cannot be written: " in sentence
    if mounted:
        subprocess.run(["umount", str(out)], check=True)
    elif os.geteuid():
        out.chmod(0o755)
    else:
        out.unlink()
        out.with_name("elsewhere").rename(out)
    goes_on(out, text_dir, expected)


def test_two_processes_in_one_directory(
    text_dir: Path, expected: list[dict], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    first = started("wait", out, text_dir)
    while not (out / "waiting").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    code, _, err = ended(started("nothing", out, text_dir))
    assert code == 1
    assert err == f"normrnn: another process is training in {out}\n"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / "go").touch()
    code, _, err = ended(first)
    assert code == 0, err
    assert rows_of(out) == expected


@pytest.mark.slow
def test_a_clock_that_jumps(text_dir: Path, expected: list[dict], tmp_path: Path) -> None:
    """A day back, and then a year ahead."""
    out = tmp_path / "run"
    code, _, err = ended(started("clock", out, text_dir))
    assert code == 0, err
    assert rows_of(out) == expected
    lines = (out / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert seconds[-1] < 3600
    assert list((out / TENSORBOARD).glob("events.*"))


def test_a_cache_without_permission(text_dir: Path, expected: list[dict], tmp_path: Path) -> None:
    """Then without compiled kernels: the same numbers but for the last bits."""
    out = tmp_path / "run"
    code, _, err = ended(started("nothing", out, text_dir, XDG_CACHE_HOME="/sys"))
    assert code == 0, err
    rows = rows_of(out)
    assert [(row["updates"], row["split"]) for row in rows] == [
        (row["updates"], row["split"]) for row in expected
    ]
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in expected], rel=1e-4)
    assert json.loads((out / "environment.json").read_text())[0]["recurrence"]["kernels"] == "torch"
