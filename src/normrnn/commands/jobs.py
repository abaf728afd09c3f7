"""Several runs at once, each one process, or a few."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGTERM

from normrnn.config.base import Config
from normrnn.engine.launch import DIVERGED, start_run
from normrnn.errors import UserError
from normrnn.processes import Child, ended_politely, stop


@dataclass
class Job:
    """One run of a comparison."""

    config: Config
    out: Path
    options: Sequence[str] = ()
    may_diverge: bool = False
    """Then that is a finding, and no failure."""
    processes: int = 1
    """Those that train it together."""
    child: Child | None = None
    ended: int | None = None
    """The exit code of a run that had ended before: no process is started for it."""
    reason: str = ""
    """Why such a run diverged."""
    setting: str = ""
    """What sets it apart, if not its seed."""

    @property
    def label(self) -> str:
        """The variant and its seed, as reports name them."""
        return f"{self.config.norm}, {self.setting or f'seed {self.config.seed}'}"

    @property
    def code(self) -> int | None:
        """The exit code; None before the end."""
        return self.ended if self.child is None else self.child.code

    @property
    def state(self) -> str:
        """waiting, running, done, stopped, diverged or failed."""
        if self.code is None:
            return "waiting" if self.child is None else "running"
        states = {0: "done", 130: "stopped", -SIGTERM: "stopped", DIVERGED: "diverged"}
        return states.get(self.code, "failed")

    @property
    def failed(self) -> bool:
        """Ended as it should not."""
        return bool(self.code) and not (self.may_diverge and self.code == DIVERGED)

    def last_words(self) -> str:
        """Why it ended."""
        return self.reason if self.child is None else self.child.last_words()

    def start(self) -> None:
        """Begin, or go on with, the run."""
        self.child = start_run(self.config, self.out, self.processes, self.options)


@dataclass
class Jobs:
    """All runs of a comparison, at most `limit` of them at a time."""

    jobs: Sequence[Job]
    limit: int
    _waiting: list[Job] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = [job for job in self.jobs if job.code is None]

    def run(self, watch: Callable[[], None], interval: float = 0.5) -> None:
        """Run them all, calling `watch` now and then; UserError naming the first that failed."""
        with ended_politely():
            try:
                while any(job.code is None for job in self.jobs):
                    running = sum(job.state == "running" for job in self.jobs)
                    for job in self._waiting[: self.limit - running]:
                        self._waiting.remove(job)
                        job.start()
                    time.sleep(interval)
                    watch()
            finally:
                stop([job.child for job in self.jobs if job.child is not None])
        for job in self.jobs:
            if job.failed:
                raise UserError(f"{job.out} failed: {job.last_words()}")


def plan(config: Config, norms: Sequence[str], seeds: int, out: Path) -> list[Job]:
    """One run per normalisation and seed, in `out`/NORM-SEED."""
    return [
        Job(
            replace(config, norm=norm, seed=seed, threads=config.threads or 1),
            out / f"{norm}-{seed}",
            may_diverge=True,
        )
        for seed in range(config.seed, config.seed + seeds)
        for norm in norms
    ]
