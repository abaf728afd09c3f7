"""Several runs at once, each a process of its own with one thread."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from normrnn.config.base import Config
from normrnn.config.jsonio import to_dict
from normrnn.engine.interrupt import PARENT
from normrnn.errors import UserError

LOG = "log.txt"
DIVERGED = 3
"""Exit code of a run whose loss is no finite number any more."""


@dataclass
class Arm:
    """One run of a comparison."""

    config: Config
    out: Path
    options: Sequence[str] = ()
    may_diverge: bool = False
    """Then that is a finding, and no failure."""
    process: subprocess.Popen[bytes] | None = None
    code: int | None = None

    @property
    def state(self) -> str:
        """In a word."""
        if self.code is not None:
            diverged = "diverged" if self.code == DIVERGED else "failed"
            return diverged if self.code else "done"
        return "waiting" if self.process is None else "running"

    def start(self) -> None:
        """Begin, or go on with, the run."""
        self.out.mkdir(parents=True, exist_ok=True)
        # A process group of its own: Ctrl-C in the terminal reaches only us, who pass it on once.
        with (self.out / LOG).open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "normrnn.commands.worker", str(self.out), *self.options],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", PARENT: str(os.getpid())},
            )
        assert self.process.stdin is not None
        with self.process.stdin as stdin:
            stdin.write(json.dumps(to_dict(self.config)).encode())

    def poll(self) -> None:
        """Notice the end."""
        if self.process is not None and self.code is None:
            self.code = self.process.poll()

    def failure(self) -> str:
        """What the run said last."""
        lines = (self.out / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
        said = [line for line in lines if line.strip()]
        return said[-1].removeprefix("normrnn: ") if said else f"exit code {self.code}"


@dataclass
class Arms:
    """All runs of a comparison, at most `jobs` of them at a time."""

    arms: Sequence[Arm]
    jobs: int
    _waiting: list[Arm] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = list(self.arms)

    def run(self, watch: Callable[[], None], interval: float = 0.5) -> None:
        """Run them all, calling `watch` now and then; UserError naming the first that failed."""
        # Whoever ends us politely means the processes too.
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, signal.default_int_handler) if main else None
        try:
            while any(arm.code is None for arm in self.arms):
                running = [a for a in self.arms if a.state == "running"]
                while self._waiting and len(running) < self.jobs:
                    arm = self._waiting.pop(0)
                    arm.start()
                    running.append(arm)
                time.sleep(interval)
                for arm in self.arms:
                    arm.poll()
                watch()
        finally:
            self._stop()
            if main:
                signal.signal(signal.SIGTERM, before)
        fine = {arm.out for arm in self.arms if arm.may_diverge and arm.code == DIVERGED}
        failed = [arm for arm in self.arms if arm.code and arm.out not in fine]
        if failed:
            raise UserError(f"{failed[0].out} failed: {failed[0].failure()}")

    def _stop(self) -> None:
        """Ask what still runs to save a checkpoint, and wait until it has."""
        for arm in self.arms:
            if arm.process is not None and arm.process.poll() is None:
                arm.process.send_signal(signal.SIGINT)
        for arm in self.arms:
            if arm.process is not None:
                arm.process.wait()


def plan(config: Config, norms: Sequence[str], seeds: int, out: Path) -> list[Arm]:
    """One arm per normalisation and seed, in `out`/NORM-SEED."""
    return [
        Arm(replace(config, norm=norm, seed=seed, threads=1), out / f"{norm}-{seed}")  # type: ignore[arg-type]
        for seed in range(config.seed, config.seed + seeds)
        for norm in norms
    ]
