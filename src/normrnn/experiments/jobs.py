"""Runs as processes of their own, several at a time: what is shown of them, and their report."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from normrnn.config.base import Config
from normrnn.config.jsonio import to_dict
from normrnn.config.registry import child_imports, task_of
from normrnn.console import PlainConsole
from normrnn.engine.callbacks import describe, duration, require_tensorboard
from normrnn.errors import UsageError, UserError
from normrnn.extras import install_command
from normrnn.files import is_held
from normrnn.processes import BUSY, DIVERGED, Child, sigterm_as_interrupt, stop, usable_cores
from normrnn.reporting.pictures import why_no_pictures
from normrnn.reporting.result import Result
from normrnn.reporting.runs import examine, find
from normrnn.reporting.study import RecordedStudy
from normrnn.runs.records import CONFIG, LOCK, LOG, Row, read_note, read_rows
from normrnn.verdicts.verdict import Settings

REPORT = "report.html"
WORKER = "normrnn.experiments.worker"
LAUNCHER = "normrnn.processes"


@dataclass
class Job:
    """A run to train in a process of its own, and what became of it."""

    out: Path
    label: str = field(default="", kw_only=True)
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
    def has_ended(self) -> bool:
        """Return whether it reached its end; one that was stopped or failed did not."""
        return self.code in (0, DIVERGED)

    def failure_reason(self) -> str:
        """Return why it ended."""
        return self.reason if self.child is None else self.child.failure_reason()

    def look(self) -> None:
        """Mark a run that has ended; UsageError if another run is in its directory."""
        raise NotImplementedError

    def start(self) -> None:
        """Start or resume it in a process of its own."""
        raise NotImplementedError

    def describe(self, row: Row) -> str:
        """Return a row of its metrics as text."""
        raise NotImplementedError


def start_worker(
    order: Mapping[str, Any],
    out: Path,
    options: Sequence[str] = (),
    processes: int = 1,
    threads: int = 1,
) -> Child:
    """Start the worker on an order, which must be plain values; its output goes to the run's log.

    It gets the import paths that this process was given.
    """
    text = json.dumps({**order, "imports": child_imports}).encode()
    module, arguments = WORKER, [str(out), *options]
    if processes > 1:
        module, arguments = LAUNCHER, [str(processes), WORKER, *arguments]
    return Child(module, arguments, text, out / LOG, threads)


@dataclass
class RunJob(Job):
    """A run of a recipe."""

    config: Config
    logs: Sequence[str] = ()
    processes: int = 1
    """Processes that train it together."""

    def look(self) -> None:
        """Mark a run that has ended; UsageError if another run is in its directory."""
        from normrnn.engine.loop import refuse_changes
        from normrnn.runs.store import RunDirectory

        if not (self.out / CONFIG).exists():
            return
        refuse_changes(RunDirectory(self.out).config(), self.config, self.out)
        try:
            run = examine(self.out)
        except UserError:
            return  # the process that resumes it says what is wrong
        if run.problem or run.notices or not run.verified or run.training:
            return
        if run.config.get("epochs") != self.config.epochs:
            return
        if run.diverged:
            self.ended, self.reason = DIVERGED, run.diverged
        elif (note := read_note(self.out)) and note.finished == self.config.epochs:
            self.ended = 0

    def start(self) -> None:
        """Start or resume the run."""
        order, threads = {"config": to_dict(self.config)}, self.config.threads or 1
        self.child = start_worker(order, self.out, self.logs, self.processes, threads)

    def describe(self, row: Row) -> str:
        """Return a row of its metrics as text."""
        config = self.config
        keeps = config.normalisation.keeps_statistics
        return describe(row, config.epochs, config.loss_measure, keeps)


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
        from normrnn.runs.environment import named_device

        if "tensorboard" in logs:
            require_tensorboard()
        named_device(config.device)
        self.workers, self.processes, self.logs = workers, processes, logs
        self.console = PlainConsole()
        self.data = task_of(config).open(config)

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, soft_wrap=True)

    def train(self, jobs: Sequence[RunJob]) -> None:
        """Run jobs to their end; UsageError, before any starts, if one was begun differently."""
        for job in jobs:
            job.config = self.data.completed(job.config)
            job.processes, job.logs = self.processes, self.logs
            job.look()
        cores = self.processes * max(job.config.threads for job in jobs)
        run_jobs(jobs, self.workers or max(1, usable_cores() // cores), self.console)


def run_jobs(jobs: Sequence[Job], limit: int, console: PlainConsole, interval: float = 0.5) -> None:
    """Run all jobs, at most `limit` at a time, and show their progress.

    A run that another command trains is waited for. UserError that names the first job that
    failed, after the others have ended.
    """
    waiting = [job for job in jobs if job.code is None]
    failed: list[Job] = []
    progress, status = Progress(jobs, console), None
    if waiting and console.is_terminal and not progress.notebook:
        status = console.status("training")
        progress.update = status.update
    with sigterm_as_interrupt(), status or nullcontext():
        try:
            while any(job.code is None for job in jobs):
                for job in waiting[:]:
                    is_full = sum(one.child is not None and one.code is None for one in jobs)
                    if is_full >= limit or is_held(job.out / LOCK):
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
                    elif job.code is not None and not job.has_ended and job not in failed:
                        failed.append(job)
                        if any(one.code is None for one in jobs):  # else it is raised below
                            text = f"{job.label} failed: {job.failure_reason()}"
                            console.print(f"{text}; the other runs continue", soft_wrap=True)
                progress.show()
        finally:
            stop([job.child for job in jobs if job.child is not None])
    for job in failed:
        raise UserError(f"{job.out} failed: {job.failure_reason()}")


class Progress:
    """Prints validations and tests of runs as they come, how many are done and the time left."""

    def __init__(self, jobs: Sequence[Job], console: PlainConsole) -> None:
        self.jobs, self.console, self.notebook = jobs, console, _notebook_line()
        self.update = self.notebook
        """Shows the progress in place of what it showed last; a notebook shows nothing else."""
        self.done = sum(job.has_ended for job in jobs)
        rows = [read_rows(job.out) for job in jobs]
        self.seen = [len(r) * job.has_ended for job, r in zip(jobs, rows, strict=True)]
        """Rows of each run that were printed, or belong to a run that had ended before."""
        self.shares = [_share_done(job, r) for job, r in zip(jobs, rows, strict=True)]
        self.before, self.start = sum(self.shares), time.monotonic()

    def show(self) -> None:
        """Print what is new: of what a function logged, the last of each split."""
        for number, job in enumerate(self.jobs):
            rows = read_rows(job.out)
            new = [row for row in rows[self.seen[number] :] if row["split"] != "train"]
            self.seen[number], self.shares[number] = len(rows), _share_done(job, rows)
            last = {row["split"]: row for row in new}
            for row in new:
                if isinstance(job, RunJob) or row is last[row["split"]]:
                    self._say(f"{job.label}: {job.describe(row)}")
        before, self.done = self.done, sum(job.has_ended for job in self.jobs)
        text, gain = f"{self.done} of {len(self.jobs)} runs done", sum(self.shares) - self.before
        if gain > 0 and self.done < len(self.jobs):
            rate = gain / (time.monotonic() - self.start)
            text += f", about {duration((len(self.jobs) - sum(self.shares)) / rate)} left"
        if self.update:
            self.update(text)
        if self.done > before:
            self._say(text)

    def _say(self, text: str) -> None:
        if not self.notebook:
            self.console.print(text, soft_wrap=True)


def _notebook_line() -> Callable[[str], None] | None:
    """Return a function that replaces a line of text in a notebook; None elsewhere."""
    module: Any = sys.modules.get("IPython")
    if not (module and hasattr(module.get_ipython(), "kernel")):
        return None
    line = module.display.display({"text/plain": ""}, raw=True, display_id=True)
    return lambda text: line.update({"text/plain": text}, raw=True)


def _share_done(job: Job, rows: Sequence[Row]) -> float:
    """Return the share of a run's work that is done, in whole epochs."""
    if isinstance(job, RunJob) and rows and not job.has_ended:
        return (rows[-1]["epoch"] - 1) / job.config.epochs
    return float(job.has_ended)


def check_counts(**counts: int | None) -> None:
    """Raise UsageError for an option that is not a whole number of at least 1."""
    for name, count in counts.items():
        if count is not None and not (isinstance(count, Integral) and count >= 1):
            raise UsageError(f"--{name} must be a whole number of at least 1, not {count!r}")


def check_report(out: Path) -> str:
    """Return what the report in `out` will lack, and how to get it; empty if nothing.

    UserError if another file is in its place, or in that of a directory.
    """
    if any(path.is_file() for path in (out, *out.parents)):
        raise UsageError(f"{out} cannot be created: a file is in the way")
    try:
        from normrnn.reporting.page import refuse_other
    except ImportError as error:
        return f"no {REPORT} ({error}): {install_command('report')}"
    refuse_other(out / REPORT)
    return why_no_pictures()


def report_line(out: Path) -> str:
    """Return where the report is, and what it lacks."""
    path, omitted = out / REPORT, check_report(out)
    return f"report: {path}{f' ({omitted})' if omitted else ''}" if path.exists() else omitted


def conclude(
    directories: Sequence[Path],
    title: str,
    out: Path,
    studies: Sequence[RecordedStudy] = (),
    target: float | None = None,
    folder: object = None,
) -> Result:
    """Read the runs, judge them and write OUT/report.html, if Jinja2 is installed."""
    result = Result(*find(directories), title, studies, Settings(target=target), folder)
    with suppress(ImportError):
        result.save(out / REPORT)
    return result
