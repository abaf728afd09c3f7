"""Workers of a group killed at random moments under `torchrun --max-restarts`.

Part of `python -m benchmarks.faults --processes K`. SIGKILL of a random worker, one time in four
while the group starts, else when it has begun to train; torchrun starts the group again. At the
end rows, checkpoint and weights must be bit-equal to those of a group that nobody disturbed.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from normrnn.runs.names import METRICS
from tests.torchrun import environment, workers

EPOCHS = {"text": "8", "speech": "15"}
"""Long enough for most of a group's life to be training, though it starts in seconds."""
PATIENCE = 300.0


def launch(words: list[str], processes: int, restarts: int, log: Path) -> subprocess.Popen[bytes]:
    """torchrun, on a port of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    launcher += ["--max-restarts", str(restarts), "--monitor-interval", "0.05"]
    with log.open("ab") as file:
        return subprocess.Popen(
            [*launcher, "-m", "normrnn", *words], env=environment(), stdout=file, stderr=file
        )


def torment(soak: Any, words: list[str], number: int, options: Any) -> None:
    """One run, killed until it has finished or there have been enough kills."""
    out, log = soak.where / f"run-{number}", soak.where / f"log-{number}"
    words = [*words, "--out", str(out)]
    group = launch(words, options.processes, 10 * options.kills, log)
    known: set[int] = set()
    while soak.kills.total() < options.kills and group.poll() is None:
        found = _fresh(group, known, options.processes)
        if not found:
            break
        known |= set(found)
        begun = soak.draw.random() < 0.75
        if begun:
            _trains(group, found, out / METRICS)
        time.sleep(soak.draw.uniform(0.0, 2.0))
        victim = soak.draw.choice(found)
        if group.poll() is None and _alive(victim):
            os.kill(victim, signal.SIGKILL)
            soak.kills["in training" if begun else "while they start"] += 1
    try:
        code = group.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        group.kill()
        code = None
    soak.check(code == 0, f"{out}: torchrun ended with {code}, see {log}")
    said = log.read_text(errors="replace")
    soak.check("not foreseen" not in said and "damaged" not in said, f"{log}: an error")


def _fresh(group: subprocess.Popen[bytes], known: set[int], count: int) -> list[int]:
    """The workers of the next start; none if there is none any more."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and group.poll() is None:
        found = [pid for pid in workers(group.pid) if pid not in known and _alive(pid)]
        if len(found) == count:
            return found
        time.sleep(0.02)
    return []


def _trains(group: subprocess.Popen[bytes], pids: list[int], metrics: Path) -> None:
    """Wait until rows are written."""
    before = metrics.stat().st_mtime_ns if metrics.exists() else 0
    while group.poll() is None and all(map(_alive, pids)):
        if metrics.exists() and metrics.stat().st_mtime_ns > before:
            return
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
