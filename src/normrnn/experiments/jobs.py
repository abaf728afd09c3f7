"""Several runs at a time, each in one process or a few."""

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
    """A process to start, and what became of it."""

    out: Path
    may_diverge: bool = field(default=False, kw_only=True)
    """Whether divergence is a result instead of a failure."""
    child: Child | None = field(default=None, kw_only=True)
    ended: int | None = field(default=None, kw_only=True)
    """The exit code of a run that ended earlier: no process is started for it."""
    reason: str = field(default="", kw_only=True)
    """Why such a run diverged."""

    @property
    def label(self) -> str:
        """Return the variant and its seed, as reports name them."""
        return self.out.name

    @property
    def code(self) -> int | None:
        """Return the exit code; None before the end."""
        return self.ended if self.child is None else self.child.code

    @property
    def state(self) -> str:
        """Return waiting, running, done, stopped, diverged or failed."""
        if self.code is None:
            return "waiting" if self.child is None else "running"
        states = {0: "done", 130: "stopped", -SIGTERM: "stopped", DIVERGED: "diverged"}
        return states.get(self.code, "failed")

    @property
    def failed(self) -> bool:
        """Return whether it ended with an error."""
        return bool(self.code) and not (self.may_diverge and self.code == DIVERGED)

    def last_words(self) -> str:
        """Return why it ended."""
        return self.reason if self.child is None else self.child.last_words()

    def start(self) -> None:
        """Start the process."""
        raise NotImplementedError


@dataclass
class RunJob(Job):
    """A run of a recipe."""

    config: Config
    options: Sequence[str] = ()
    processes: int = 1
    """Processes that train it together."""
    setting: str = ""
    """What distinguishes it, if not its seed."""

    @property
    def label(self) -> str:
        """Return the variant and its seed, as reports name them."""
        return f"{self.config.norm}, {self.setting or f'seed {self.config.seed}'}"

    def start(self) -> None:
        """Start or resume the run."""
        self.child = start_run(self.config, self.out, self.processes, self.options)


def run_jobs(
    jobs: Sequence[Job], limit: int, watch: Callable[[], None], interval: float = 0.5
) -> None:
    """Run all jobs, at most `limit` at a time, and call `watch` every `interval` seconds.

    UserError that names the first job that failed, after the others have ended.
    """
    waiting = [job for job in jobs if job.code is None]
    with ended_politely():
        try:
            while any(job.code is None for job in jobs):
                running = sum(job.state == "running" for job in jobs)
                for job in waiting[: limit - running]:
                    waiting.remove(job)
                    job.start()
                time.sleep(interval)
                watch()
        finally:
            stop([job.child for job in jobs if job.child is not None])
    for job in jobs:
        if job.failed:
            raise UserError(f"{job.out} failed: {job.last_words()}")


def plan(config: Config, norms: Sequence[str], seeds: int, out: Path) -> list[RunJob]:
    """Return one run per normalisation and seed, in `out`/NORM-SEED."""
    return [
        RunJob(
            out / f"{norm}-{seed}",
            replace(config, norm=norm, seed=seed, threads=config.threads or 1),
            may_diverge=True,
        )
        for seed in range(config.seed, config.seed + seeds)
        for norm in norms
    ]
