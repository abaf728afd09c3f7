"""Runs as processes of their own, several at a time: what is shown of them, and their report."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGTERM
from typing import Any

from normrnn.config.base import Config
from normrnn.config.registry import task_of
from normrnn.console import PlainConsole
from normrnn.engine.callbacks import describe, duration, require_tensorboard
from normrnn.engine.launch import BUSY, DIVERGED, start_run
from normrnn.errors import UsageError, UserError
from normrnn.extras import install_command
from normrnn.files import is_held
from normrnn.processes import Child, ended_politely, stop, usable_cores
from normrnn.reporting.pictures import why_no_pictures
from normrnn.reporting.result import Result
from normrnn.reporting.runs import examine, find
from normrnn.reporting.study import RecordedStudy
from normrnn.runs.records import CONFIG, LOCK, Row, read_note, read_rows
from normrnn.verdicts.verdict import Settings

REPORT = "report.html"
_STATES = {None: "running", 0: "done", DIVERGED: "diverged", 130: "stopped", -SIGTERM: "stopped"}
"""State of a run by the exit code of its process; "failed" for any other."""


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
    def state(self) -> str:
        """Return waiting, running, done, stopped, diverged or failed."""
        is_waiting = self.child is None and self.ended is None
        return "waiting" if is_waiting else _STATES.get(self.code, "failed")

    @property
    def has_ended(self) -> bool:
        """Return whether it reached its end; one that was stopped or failed did not."""
        return self.state in ("done", "diverged")

    @property
    def rows(self) -> list[Row]:
        """Return its rows so far."""
        return read_rows(self.out)

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

    def share_done(self) -> float:
        """Return the share of its work that is done, in whole epochs."""
        return float(self.has_ended)


@dataclass
class RunJob(Job):
    """A run of a recipe."""

    config: Config
    logs: Sequence[str] = ()
    processes: int = 1
    """Processes that train it together."""

    def look(self) -> None:
        """Mark a run that has ended; UsageError if another run is in its directory."""
        from normrnn.engine.start import refuse_changes
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
        self.child = start_run(self.config, self.out, self.processes, self.logs)

    def describe(self, row: Row) -> str:
        """Return a row of its metrics as text."""
        config = self.config
        keeps = config.normalisation.keeps_statistics
        return describe(row, config.epochs, config.loss_measure, keeps)

    def share_done(self) -> float:
        """Return the share of its work that is done, in whole epochs."""
        if self.has_ended or not self.rows:
            return float(self.has_ended)
        return (self.rows[-1]["epoch"] - 1) / self.config.epochs


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
    """Run all jobs, at most `limit` at a time, and show their rows and progress.

    A run that another command trains is waited for. UserError that names the first job that
    failed, after the others have ended.
    """
    waiting = [job for job in jobs if job.code is None]
    failed: list[Job] = []
    status = console.status("") if waiting and console.is_terminal else None
    progress = Progress(jobs, console, status and status.update)
    with ended_politely(), status or nullcontext():
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
                    elif job.state == "failed" and job not in failed:
                        failed.append(job)
                        if any(one.code is None for one in jobs):  # else it is raised below
                            text = f"{job.label} failed: {job.last_words()}"
                            console.print(f"{text}; the other runs continue", soft_wrap=True)
                progress.show()
        finally:
            stop([job.child for job in jobs if job.child is not None])
    for job in failed:
        raise UserError(f"{job.out} failed: {job.last_words()}")


class Progress:
    """Rows of runs as lines, and the progress of all together with the time left."""

    def __init__(
        self,
        jobs: Sequence[Job],
        console: PlainConsole,
        status: Callable[[str], Any] | None = None,
    ) -> None:
        """`status` shows the progress in place of what it showed last."""
        self.jobs, self.console = jobs, console
        self.began, self.before = time.monotonic(), self._done()
        self.seen = [len(job.rows) * job.has_ended for job in jobs]
        """Rows of each run that were printed, or belong to a run that had ended before."""
        self.notebook = notebook_line()
        self.status = self.notebook or status

    def _done(self) -> float:
        return sum(job.share_done() for job in self.jobs)

    def line(self) -> str:
        """Return the state of all runs."""
        done, ended = self._done(), sum(job.has_ended for job in self.jobs)
        text = f"{ended} of {len(self.jobs)} runs done"
        if done <= self.before or ended == len(self.jobs):
            return text
        elapsed = time.monotonic() - self.began
        left = (len(self.jobs) - done) * elapsed / (done - self.before)
        return f"{text}, about {duration(left)} left"

    def show(self) -> None:
        """Print rows that are new, but not in a notebook, and the progress."""
        has_validation = self.notebook is None and self._print_new()
        if self.status is not None:
            self.status(self.line())
        elif has_validation:
            self.console.print(self.line(), soft_wrap=True)

    def _print_new(self) -> bool:
        """Print the rows that are new; return whether a validation was among them."""
        has_validation = False
        for number, job in enumerate(self.jobs):
            rows = job.rows
            new, self.seen[number] = rows[self.seen[number] :], len(rows)
            last = {row["split"]: row for row in new}
            for row in new:
                is_frequent = row["split"] == "train" or "value" in row  # of a function
                if not is_frequent or row is last[row["split"]]:
                    self.console.print(f"{job.label}: {job.describe(row)}", soft_wrap=True)
            has_validation = has_validation or "valid" in last
        return has_validation


def notebook_line() -> Callable[[str], None] | None:
    """Return a function that shows a line of text in place of the last; None outside notebooks."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    if module is None or not hasattr(shell, "kernel"):
        return None
    shown = module.display.display({"text/plain": ""}, raw=True, display_id=True)
    return lambda text: shown.update({"text/plain": text}, raw=True)


def check_counts(**counts: int | None) -> None:
    """Raise UsageError for an option that is below 1."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise UsageError(f"--{name} must be at least 1, not {count}")


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
