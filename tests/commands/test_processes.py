"""`--processes`: arms of a comparison that several processes train together."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from normrnn import compare
from normrnn.experiments.jobs import RunJob
from normrnn.processes import DIVERGED, Child, stop
from normrnn.text.config import LanguageConfig
from tests.tiny_runs import note_of, rows_of
from tests.torchrun import checkpoint

SETTINGS = ["--model.hidden", "12", "--train.batch", "8", "--train.steps", "5", "--epochs", "2"]
SETTINGS += ["--train.log-every", "5", "--evaluation.train-tokens", "0"]


def ended(pids: list[int], seconds: float = 40) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def inside(directory: Path) -> list[int]:
    """Processes that were told this directory."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(place.name) != os.getpid() and str(directory).encode() in b" ".join(words):
            found.append(int(place.name))
    return found


def sockets(pids: list[int]) -> list[str]:
    """Local addresses, in hexadecimal, on which these processes listen."""
    own = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                own.add(str(link.readlink()))
    found = []
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].split(":")[0])
    return found


def started(config: LanguageConfig, out: Path) -> Child:
    """Two processes that train a run."""
    job = RunJob(out, config, processes=2)
    job.start()
    assert job.child is not None
    return job.child


def test_no_port_is_open_beyond_the_loopback(
    tiny: LanguageConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a module in the current directory run, or what a cluster says of ranks disturb."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("struct", "filelock", "json"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    monkeypatch.chdir(here)
    cluster = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "9"}
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "out"
    child = started(replace(tiny, epochs=500), out)
    try:
        while not (out / "metrics.jsonl").exists() or len(rows_of(out)) < 3:
            assert child.code is None, child.failure_reason()
            time.sleep(0.05)
        addresses = sockets(inside(out))
    finally:
        stop([child])
    assert addresses
    assert set(addresses) == {"0100007F"}
    assert child.code == 130
    assert not (tmp_path / "canary").exists()


@pytest.mark.slow
def test_a_comparison_gives_each_arm_two(text_dir: Path, tmp_path: Path) -> None:
    small = {"hidden": 12, "dropout": 0.0}
    fields = {"train": {"batch": 8, "steps": 5, "log_every": 5}, "model": small, "epochs": 2}
    fields |= {"optimizer": {"lr": 0.1}}  # in larger steps the last digits drift apart
    runs = compare("ptb-small", data=text_dir, out=tmp_path / "two", processes=2, **fields)
    alone = compare("ptb-small", data=text_dir, out=tmp_path / "one", **fields)
    for run, one in zip(runs.runs, alone.runs, strict=True):
        assert checkpoint(run.path)["processes"] == 2
        assert checkpoint(one.path)["processes"] == 1
        losses = [[r["loss"] for r in some.rows] for some in (run, one)]
        assert losses[0] == pytest.approx(losses[1], rel=2e-4)


@pytest.mark.slow
def test_what_goes_wrong_is_the_last_line_and_the_exit_code(
    tiny: LanguageConfig, tmp_path: Path
) -> None:
    child = started(replace(tiny, norm="hidden"), tmp_path / "refused")
    child.wait()
    assert child.code == 2
    assert "--train.no-sync-statistics" in child.failure_reason()
    wild = replace(tiny, optimizer=replace(tiny.optimizer, lr=1e38, clip_norm=0.0))
    child = started(wild, tmp_path / "wild")
    child.wait()
    assert child.code == DIVERGED
    assert "at update" in child.failure_reason()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_all_end_with_the_command(number: signal.Signals, text_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["compare", "ptb-small", "--data", str(text_dir), "--out", str(out), *SETTINGS]
    words += ["--epochs", "500", "--norms", "frame", "--processes", "2"]
    command = subprocess.Popen(
        [sys.executable, "-m", "normrnn", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = out / "frame-1" / "metrics.jsonl"
    while not metrics.exists() or len(rows_of(metrics.parent)) < 3:
        assert command.poll() is None
        time.sleep(0.1)
    started = [pid for pid in inside(out) if pid != command.pid]
    assert len(started) == 3  # who starts them, and two that train
    command.send_signal(number)
    said, _ = command.communicate(timeout=120)
    assert ended(started)
    if number == signal.SIGINT:
        assert "stopped; the same command resumes" in said
    # What they had is in the checkpoint.
    assert note_of(metrics.parent).updates > 0
