"""Runs as processes of their own, several at a time, and what is shown of them."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGTERM
from typing import Any

from normrnn.config.base import Config
from normrnn.console import PlainConsole
from normrnn.engine.launch import BUSY, DIVERGED, start_run
from normrnn.errors import UserError
from normrnn.files import is_held
from normrnn.processes import Child, ended_politely, stop, usable_cores
from normrnn.runs.records import CONFIG, LOCK, Row, read_note, read_rows


@dataclass
class Job:
    """A run to train in a process of its own, and what became of it."""

    out: Path
    label: str = field(default="", kw_only=True)
    may_diverge: bool = field(default=True, kw_only=True)
    """Whether divergence is a result instead of a failure."""
    child: Child | None = field(default=None, kw_only=True)
    ended: int | None = field(default=None, kw_only=True)
    """The exit code of a run that ended elsewhere or earlier: no process is started for it."""
    reason: str = field(default="", kw_only=True)
    """Why such a run diverged."""

    @property
    def code(self) -> int | None:
        """Return the exit code; None before the end."""
        return self.ended if self.child is None else self.child.code

    @property
    def state(self) -> str:
        """Return waiting, running, done, stopped, diverged or failed."""
        if self.code is None:
            return "waiting" if self.child is None else "running"
        states = {0: "done", 130: "stopped", -SIGTERM: "stopped"}
        if self.may_diverge:
            states[DIVERGED] = "diverged"
        return states.get(self.code, "failed")

    @property
    def has_ended(self) -> bool:
        """Return whether it reached its end; one that was stopped or failed did not."""
        return self.state in ("done", "diverged")

    def last_words(self) -> str:
        """Return why it ended."""
        return self.reason if self.child is None else self.child.last_words()

    def look(self) -> None:
        """Mark a run that has ended; UsageError if another run is in its directory."""
        raise NotImplementedError

    def start(self) -> None:
        """Start or resume it in a process of its own."""
        raise NotImplementedError

    def describe(self, row: Row) -> str:
        """Return a row of its metrics as text."""
        raise NotImplementedError

    def share_done(self, rows: Sequence[Row]) -> float:  # noqa: ARG002
        """Return the share of its work that is done, in whole epochs."""
        return float(self.has_ended)


@dataclass
class RunJob(Job):
    """A run of a recipe."""

    config: Config
    options: Sequence[str] = ()
    processes: int = 1
    """Processes that train it together."""

    def look(self) -> None:
        """Mark a run that has ended; UsageError if another run is in its directory."""
        from normrnn.engine.start import refuse_changes
        from normrnn.reporting.runs import examine
        from normrnn.runs.store import RunDirectory

        if not (self.out / CONFIG).exists():
            return
        refuse_changes(RunDirectory(self.out).config(), self.config, self.out)
        try:
            run = examine(self.out)
        except UserError:
            return
        if run.problem or run.notices or not run.verified or run.training:
            return  # the process that resumes it says what is wrong
        if run.config.get("epochs") != self.config.epochs:
            return
        if "tensorboard" in self.options and not (self.out / "tensorboard").is_dir():
            return
        if run.diverged:
            self.ended, self.reason = DIVERGED, run.diverged
        elif (note := read_note(self.out)) and note.finished == self.config.epochs:
            self.ended = 0

    def start(self) -> None:
        """Start or resume the run."""
        self.child = start_run(self.config, self.out, self.processes, self.options)

    def describe(self, row: Row) -> str:
        """Return a row of its metrics as text."""
        from normrnn.engine.callbacks import describe

        config = self.config
        keeps = config.normalisation.keeps_statistics
        return describe(row, config.epochs, config.loss_measure, keeps)

    def share_done(self, rows: Sequence[Row]) -> float:
        """Return the share of its work that is done, in whole epochs."""
        if self.has_ended or not rows:
            return float(self.has_ended)
        return (rows[-1]["epoch"] - 1) / self.config.epochs


def plan(config: Config, norms: Sequence[str], seeds: int, out: Path) -> list[RunJob]:
    """Return one run per normalisation and seed, in `out`/NORM-SEED."""
    return [
        RunJob(
            out / f"{norm}-{seed}",
            replace(config, norm=norm, seed=seed, threads=config.threads or 1),
            label=f"{norm}, seed {seed}",
        )
        for seed in range(config.seed, config.seed + seeds)
        for norm in norms
    ]


class Runner:
    """Trains runs of one experiment, several at a time."""

    def __init__(
        self, config: Config, workers: int | None, processes: int, logs: Sequence[str] = ()
    ) -> None:
        """Open the data, so that what is missing is reported before any run starts."""
        from normrnn.engine.start import open_experiment
        from normrnn.runs.environment import named_device

        if "tensorboard" in logs:
            from normrnn.engine.callbacks import require_tensorboard

            require_tensorboard()
        named_device(config.device)
        self.workers, self.processes, self.logs = workers, processes, logs
        self.console = PlainConsole()
        self.data = open_experiment(config)

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, soft_wrap=True)

    def say_data(self, name: bool = True) -> None:
        """Print what the data is; `name`: also its name."""
        source, path = self.data.source, f"{self.data.config.data}: "
        self.say(f"data: {source if name else source.removeprefix(path)}")

    def train(self, jobs: Sequence[RunJob]) -> None:
        """Run jobs to their end; UsageError, before any starts, if one was begun differently."""
        for job in jobs:
            job.config = self.data.completed(job.config)
            job.processes, job.options = self.processes, self.logs
            job.look()
        if all(job.code is not None for job in jobs):
            return
        cores = self.processes * max(job.config.threads for job in jobs)
        run_jobs(jobs, self.workers or max(1, usable_cores() // cores), self.console)


def run_jobs(jobs: Sequence[Job], limit: int, console: PlainConsole, interval: float = 0.5) -> None:
    """Run all jobs, at most `limit` at a time, and show their rows and progress.

    A run that another command trains is waited for. UserError that names the first job that
    failed, after the others have ended.
    """
    waiting = [job for job in jobs if job.code is None]
    progress = Progress(jobs, console)
    with ended_politely(), progress.status:
        try:
            while any(job.code is None for job in jobs):
                for job in waiting[:]:
                    is_full = sum(one.state == "running" for one in jobs) >= limit
                    if is_full or is_held(job.out / LOCK):
                        continue
                    waiting.remove(job)
                    job.look()
                    if job.code is None:
                        job.start()
                time.sleep(interval)
                for job in jobs:
                    if job.code == BUSY:  # another command was faster
                        job.child = None
                        waiting.append(job)
                progress.show()
        finally:
            stop([job.child for job in jobs if job.child is not None])
    for job in jobs:
        if job.state == "failed":
            raise UserError(f"{job.out} failed: {job.last_words()}")


class Progress:
    """Rows of runs as lines, and the progress of all together with the time left."""

    def __init__(self, jobs: Sequence[Job], console: PlainConsole, has_status: bool = True) -> None:
        """`has_status`: whether a line below the others may show the progress, on a terminal."""
        self.jobs, self.console = jobs, console
        rows = [read_rows(job.out) for job in jobs]
        self.began, self.before = time.monotonic(), self._done(rows)
        self.seen = [len(r) * job.has_ended for job, r in zip(jobs, rows, strict=True)]
        """Rows of each run that were printed, or belong to a run that had ended before."""
        self.failed: list[Job] = []
        self.notebook = notebook_line()
        self.has_status = has_status and console.is_terminal and self.notebook is None
        self.status: Any = console.status(self.line(rows)) if self.has_status else nullcontext()

    def _done(self, rows: Sequence[Sequence[Row]]) -> float:
        return sum(job.share_done(r) for job, r in zip(self.jobs, rows, strict=True))

    def line(self, rows: Sequence[Sequence[Row]]) -> str:
        """Return the state of all runs, `rows` being those of each."""
        from normrnn.engine.callbacks import duration

        done, ended = self._done(rows), sum(job.has_ended for job in self.jobs)
        text = f"{ended} of {len(self.jobs)} runs done"
        if done <= self.before or ended == len(self.jobs):
            return text
        elapsed = time.monotonic() - self.began
        left = (len(self.jobs) - done) * elapsed / (done - self.before)
        return f"{text}, about {duration(left)} left"

    def show(self) -> None:
        """Print rows that are new, and below them, on a terminal, the progress; in a notebook that
        alone."""
        rows = [read_rows(job.out) for job in self.jobs]
        if self.notebook is not None:
            self.notebook(self.line(rows))
            return
        has_validation = self._print_new(rows)
        if self.has_status:
            self.status.update(self.line(rows))
        elif has_validation:
            self.console.print(self.line(rows), soft_wrap=True)

    def _print_new(self, every: Sequence[Sequence[Row]]) -> bool:
        """Print the rows that are new; return whether a validation was among them."""
        has_validation, are_running = False, any(job.code is None for job in self.jobs)
        for number, (job, rows) in enumerate(zip(self.jobs, every, strict=True)):
            # The failure of the last is raised as an error.
            if are_running and job.state == "failed" and job not in self.failed:
                self.failed.append(job)
                self._say(job, f" failed: {job.last_words()}; the other runs continue")
            new, self.seen[number] = rows[self.seen[number] :], len(rows)
            last = {row["split"]: row for row in new}
            for row in new:
                is_frequent = row["split"] == "train" or "value" in row  # of a function
                if not is_frequent or row is last[row["split"]]:
                    self._say(job, f": {job.describe(row)}")
                has_validation = has_validation or row["split"] == "valid"
        return has_validation

    def _say(self, job: Job, text: str) -> None:
        self.console.print(f"{job.label}{text}", soft_wrap=True)


def notebook_line() -> Callable[[str], None] | None:
    """Return a function that shows a line of text in place of the last; None outside notebooks."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    if module is None or not hasattr(shell, "kernel"):
        return None
    shown = module.display.display({"text/plain": ""}, raw=True, display_id=True)
    return lambda text: shown.update({"text/plain": text}, raw=True)
