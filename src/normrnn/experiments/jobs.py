"""Runs as processes of their own, several at a time: what is shown of them, and their report."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from normrnn.config.base import Config
from normrnn.config.jsonio import to_dict
from normrnn.config.registry import child_imports, task_of
from normrnn.engine.callbacks import describe, duration, require_tensorboard
from normrnn.errors import UsageError, UserError
from normrnn.files import is_held
from normrnn.processes import BUSY, DIVERGED, Child, sigterm_as_interrupt, stop, usable_cores
from normrnn.reporting.result import REPORT, Result
from normrnn.reporting.runs import examine, find
from normrnn.reporting.study import RecordedStudy
from normrnn.runs.records import CONFIG, LOCK, LOG, Row, read_note, read_rows
from normrnn.terminal import printable
from normrnn.verdicts.verdict import Settings


def say(text: str) -> None:
    """Print text at once, its control characters escaped also where no command runs."""
    print(printable(text), flush=True)


@dataclass
class Job:
    """A run to train in a process of its own, and what became of it."""

    out: Path
    _: KW_ONLY
    label: str = ""
    logs: Sequence[str] = ()
    processes: int = 1  # that train it together
    child: Child | None = None
    ended: int | None = None  # exit code of a run that ended elsewhere or earlier: not started
    reason: str = ""  # why such a run diverged

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

    def mark_if_ended(self) -> None:
        """Mark a run that has ended; UsageError if another run is in its directory."""

    def start(self) -> None:
        """Start or resume it in a process of its own."""

    def start_worker(self, order: Mapping[str, Any], threads: int = 1) -> None:
        """Start the worker on an order, which must be plain values; its output goes to the run's
        log. It gets the import paths that this process was given."""
        text = json.dumps({**order, "imports": child_imports}).encode()
        module, arguments = "normrnn.experiments.worker", [str(self.out), *self.logs]
        if self.processes > 1:
            module, arguments = "normrnn.processes", [str(self.processes), module, *arguments]
        self.child = Child(module, arguments, text, self.out / LOG, threads)

    def describe(self, rows: Sequence[Row]) -> list[str]:
        """Return new rows of its metrics as text: the last of each split."""
        last = {row["split"]: row for row in rows}
        return [f"step {r['updates']}  {r['split']} {r['value']:.5g}" for r in last.values()]

    def share_done(self) -> float:
        """Return the share of its work that is done."""
        return float(self.has_ended)


@dataclass
class RunJob(Job):
    """A run of a recipe."""

    config: Config

    def mark_if_ended(self) -> None:
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
        is_sound = run.verified and not (run.problem or run.notices or run.training)
        if not is_sound or run.config.get("epochs") != self.config.epochs:
            return
        if run.diverged:
            self.ended, self.reason = DIVERGED, run.diverged
        elif (note := read_note(self.out)) and note.finished == self.config.epochs:
            self.ended = 0

    def start(self) -> None:
        """Start or resume the run."""
        self.start_worker({"config": to_dict(self.config)}, self.config.threads or 1)

    def describe(self, rows: Sequence[Row]) -> list[str]:
        """Return new rows of its metrics as text."""
        config = self.config
        measure, keeps = config.loss_measure, config.normalisation.keeps_statistics
        return [describe(row, config.epochs, measure, keeps) for row in rows]

    def share_done(self) -> float:
        """Return the share of its epochs that are done."""
        rows = [] if self.has_ended else read_rows(self.out)
        return (rows[-1]["epoch"] - 1) / self.config.epochs if rows else float(self.has_ended)


def plan(config: Config, norms: Sequence[str], seeds: int, out: Path) -> list[RunJob]:
    """Return one run per normalisation and seed, in `out`/NORM-SEED."""
    return [
        RunJob(
            out / f"{norm}-{seed}",
            replace(config, norm=norm, seed=seed),
            label=f"{norm}, seed {seed}",
        )
        for seed in range(config.seed, config.seed + seeds)
        for norm in norms
    ]


@dataclass
class Runner:
    """Trains runs of one experiment, several at a time."""

    config: Config
    workers: int | None
    processes: int
    logs: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Open the data, so that what is missing is reported before any run starts."""
        from normrnn.runs.environment import named_device

        if "tensorboard" in self.logs:
            require_tensorboard()
        named_device(self.config.device)
        self.data = task_of(self.config).open(self.config)

    def train(self, jobs: Sequence[RunJob]) -> None:
        """Run jobs to their end; UsageError, before any starts, if one was begun differently."""
        for job in jobs:
            completed = self.data.completed(job.config)
            job.config = replace(completed, threads=completed.threads or 1)
            job.processes, job.logs = self.processes, self.logs
            job.mark_if_ended()
        cores = self.processes * max(job.config.threads for job in jobs)
        run_jobs(jobs, self.workers or max(1, usable_cores() // cores))


def run_jobs(jobs: Sequence[Job], limit: int, interval: float = 0.5) -> None:
    """Run all jobs, at most `limit` at a time, and show their progress.

    A run that another command trains is waited for. UserError that names the first job that
    failed, after the others have ended.
    """
    waiting = [job for job in jobs if job.code is None]
    failed: list[Job] = []
    progress = Progress(jobs)
    with sigterm_as_interrupt():
        try:
            while any(job.code is None for job in jobs):
                for job in waiting[:]:
                    running = sum(one.child is not None and one.code is None for one in jobs)
                    if running >= limit or is_held(job.out / LOCK):
                        continue
                    waiting.remove(job)
                    job.mark_if_ended()
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
                            reason = job.failure_reason()
                            say(f"{job.label} failed: {reason}; the other runs continue")
                progress.show()
        finally:
            stop([job.child for job in jobs if job.child is not None])
    for job in failed:
        raise UserError(f"{job.out} failed: {job.failure_reason()}")


class Progress:
    """Prints validations and tests of runs as they come, how many are done and the time left; in a
    notebook only the latter, in one line."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs, self.notebook = jobs, _notebook_line()
        # Rows of each run that were printed, or belong to a run that had ended before.
        self.printed = [len(read_rows(job.out)) * job.has_ended for job in jobs]
        self.done = sum(job.has_ended for job in jobs)
        self.before, self.start = sum(job.share_done() for job in jobs), time.monotonic()
        if self.done and not self.notebook:
            say(f"{self.done} of {len(jobs)} runs have ended before and are not repeated")

    def show(self) -> None:
        """Print what is new."""
        for number, job in enumerate(self.jobs):
            rows = read_rows(job.out)
            new = [row for row in rows[self.printed[number] :] if row["split"] != "train"]
            self.printed[number] = len(rows)
            for line in job.describe(new) if not self.notebook else ():
                say(f"{job.label}: {line}")
        before, self.done = self.done, sum(job.has_ended for job in self.jobs)
        share = sum(job.share_done() for job in self.jobs)
        text = f"{self.done} of {len(self.jobs)} runs done"
        if self.before < share and self.done < len(self.jobs):
            each = (time.monotonic() - self.start) / (share - self.before)
            text += f", about {duration((len(self.jobs) - share) * each)} left"
        if self.notebook:
            self.notebook(text)
        elif self.done > before:
            say(text)


def _notebook_line() -> Callable[[str], None] | None:
    """Return a function that replaces a line of text in a notebook; None elsewhere."""
    module: Any = sys.modules.get("IPython")
    if not (module and hasattr(module.get_ipython(), "kernel")):
        return None
    line = module.display.display({"text/plain": ""}, raw=True, display_id=True)
    return lambda text: line.update({"text/plain": text}, raw=True)


def check_counts(**counts: int | None) -> None:
    """Raise UsageError for an option that is not a whole number of at least 1."""
    for name, count in counts.items():
        if count is not None and not (isinstance(count, Integral) and count >= 1):
            raise UsageError(f"--{name} must be a whole number of at least 1, not {count!r}")


def check_out(out: Path) -> None:
    """Raise UserError if a file is in the place of the directory or of its report."""
    from normrnn.reporting.page import refuse_other

    if any(path.is_file() for path in (out, *out.parents)):
        raise UsageError(f"{out} cannot be created: a file is in the way")
    refuse_other(out / REPORT)


def write_result(
    directories: Sequence[Path],
    title: str,
    out: Path,
    studies: Sequence[RecordedStudy] = (),
    target: float | None = None,
) -> Result:
    """Read the runs, judge them and write OUT/report.html."""
    result = Result(*find(directories), title, studies, Settings(target=target))
    result.save(out / REPORT)
    return result
