"""What is shown of several runs: rows as lines, and overall progress with the time left."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

from normrnn.experiments.jobs import Job, RunJob
from normrnn.runs.rows import Row, read_rows


def notebook_line() -> Callable[[str], None] | None:
    """Return a function that shows a line of text in place of the last; None outside notebooks."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    if module is None or not hasattr(shell, "kernel"):
        return None
    shown = module.display.display({"text/plain": ""}, raw=True, display_id=True)

    def show(text: str) -> None:
        shown.update({"text/plain": text}, raw=True)

    return show


class Progress:
    """Progress of all runs together, and the time left."""

    def __init__(self, jobs: Sequence[RunJob], updates: int, console: Console) -> None:
        self.jobs, self.updates, self.console = jobs, updates, console
        rows = self._read()
        self.before, self.began = self._done(rows), time.monotonic()
        ended = [job.code is not None for job in jobs]
        self.printed = [len(r) * e for r, e in zip(rows, ended, strict=True)]
        """Rows of each run that were printed, or belong to a run that had ended before."""
        self.failed: list[RunJob] = []

    def _read(self) -> list[list[Row]]:
        return [read_rows(job.out) for job in self.jobs]

    def _done(self, rows: Sequence[Sequence[Row]]) -> int:
        """Return the updates done; an ended run has none left."""
        return sum(
            self.updates if has_ended(job) else found[-1]["updates"] if found else 0
            for job, found in zip(self.jobs, rows, strict=True)
        )

    def line(self, rows: Sequence[Sequence[Row]]) -> str:
        """Return the state of the whole comparison, `rows` being those of each run."""
        from normrnn.engine.display import duration

        total, done = self.updates * len(self.jobs), self._done(rows)
        ended = sum(map(has_ended, self.jobs))
        text = f"{ended} of {len(self.jobs)} runs done, {done / total:.0%} of all updates"
        if done == self.before or ended == len(self.jobs):
            return text
        left = (total - done) * (time.monotonic() - self.began) / (done - self.before)
        return f"{text}, about {duration(left)} left"

    @contextlib.contextmanager
    def shown(self) -> Iterator[Callable[[], None]]:
        """Yield a function that shows what is new: lines, and below them, on a terminal, one with
        the overall progress; in a notebook that one alone."""
        if (show := notebook_line()) is not None:
            yield lambda: show(self.line(self._read()))
        elif self.console.is_terminal:
            with self.console.status(self.line(self._read())) as status:
                yield lambda: status.update(self.line(self._print_new()[0]))
        else:

            def watch() -> None:
                rows, has_validation = self._print_new()
                if has_validation:
                    self._say(self.line(rows))

            yield watch

    def _print_new(self) -> tuple[list[list[Row]], bool]:
        """Print the rows that are new; return all, and whether a validation was among the new."""
        from normrnn.engine.display import describe

        # The failure of the last is raised as an error.
        are_running = any(job.code is None for job in self.jobs)
        every, has_validation = self._read(), False
        for number, (job, rows) in enumerate(zip(self.jobs, every, strict=True)):
            if are_running and job.failed and job not in self.failed:
                self.failed.append(job)
                self._say(f"{job.label} failed: {job.last_words()}; the other runs continue")
            new, self.printed[number] = rows[self.printed[number] :], len(rows)
            last_train = [row for row in new if row["split"] == "train"][-1:]
            for row in new:
                if row["split"] == "train" and row not in last_train:
                    continue
                keeps = job.config.normalisation.keeps_statistics
                text = describe(row, job.config.epochs, job.config.loss_measure, keeps)
                self._say(f"{job.label}: {text}")
                has_validation = has_validation or row["split"] == "valid"
        return every, has_validation

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)


def has_ended(job: Job) -> bool:
    """Return whether a run reached its end; one that was stopped or failed did not."""
    return job.state in ("done", "diverged")
