"""What is shown of several runs: a live table on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.table import Table

from normrnn.config.jsonio import to_dict
from normrnn.experiments.jobs import Job, RunJob
from normrnn.runs.names import METRICS
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

    def __init__(self, jobs: Sequence[Job], updates: int) -> None:
        self.jobs = jobs
        self.updates = updates
        self.before = self._done([read_rows(job.out / METRICS) for job in jobs])
        self.began = time.monotonic()

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


def has_ended(job: Job) -> bool:
    """Return whether a run reached its end; one that was stopped or failed did not."""
    return job.state in ("done", "diverged")


@contextlib.contextmanager
def watching(
    jobs: Sequence[RunJob], progress: Progress, console: Console
) -> Iterator[Callable[[], None]]:
    """Yield a function that shows all runs: a live table on a terminal, one line that is updated in
    a notebook, plain lines elsewhere."""
    if (show := notebook_line()) is not None:
        yield lambda: show(progress.line([read_rows(job.out / METRICS) for job in jobs]))
        return
    if not console.is_terminal:
        yield _line_printer(jobs, progress, console)
        return

    def table() -> RenderableType:
        return _live_table(jobs, progress, console.width)

    with Live(table(), console=console, refresh_per_second=4) as live:
        try:
            yield lambda: live.update(table())
        finally:  # an interrupted table would otherwise keep the state "running"
            live.update(table())


def _line_printer(
    jobs: Sequence[RunJob], progress: Progress, console: Console
) -> Callable[[], None]:
    from normrnn.engine.display import describe

    ended = [job.out for job in jobs if job.code is not None]
    printed = {job.out: len(read_rows(job.out / METRICS)) * (job.out in ended) for job in jobs}
    failed: list[Path] = []

    def watch() -> None:
        others = any(job.code is None for job in jobs)  # the last failure is raised as an error
        every = [read_rows(job.out / METRICS) for job in jobs]
        validated = False
        for job, rows in zip(jobs, every, strict=True):
            if others and job.failed and job.out not in failed:
                failed.append(job.out)
                text = f"{job.label} failed: {job.last_words()}; the other runs continue"
                console.print(text, soft_wrap=True)
            fresh = rows[printed[job.out] :]
            printed[job.out] = len(rows)
            last = max((i for i, r in enumerate(fresh) if r["split"] == "train"), default=None)
            config = job.config
            for i, row in enumerate(fresh):
                if row["split"] == "train" and i != last:
                    continue
                keeps = config.normalisation.keeps_statistics
                text = describe(row, config.epochs, config.own_measure, keeps)
                console.print(f"{job.label}: {text}", soft_wrap=True)
                validated = validated or row["split"] == "valid"
        if validated:
            console.print(progress.line(every), soft_wrap=True)

    return watch


def _live_table(jobs: Sequence[RunJob], progress: Progress, width: int = 80) -> RenderableType:
    """Return a row per run and the overall progress, three columns narrower than the terminal,
    which prints ^C behind it."""
    from normrnn.reporting.groups import measure
    from normrnn.reporting.runs import Run

    runs = [Run(job.out, to_dict(job.config), read_rows(job.out / METRICS)) for job in jobs]
    figure = measure(runs)
    table = Table(
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,
        caption=progress.line([run.rows for run in runs]),
        caption_justify="left",
    )
    figures = (f"train {figure.name}", f"{figure.held_out} {figure.name}")
    for name in ("run", "state", "epoch", "updates", *figures, "lr", "seconds"):
        side = "left" if name in ("run", "state") else "right"
        table.add_column(name, justify=side, no_wrap=name == "run")
    for job, run in zip(jobs, runs, strict=True):
        cells = [""] * 6
        if train := run.split("train"):
            last = train[-1]
            valid = run.split("valid", run.serving)
            cells = [
                f"{last['epoch']}/{job.config.epochs}",
                f"{last['updates']:,}",
                figure.text(last["loss"]),
                figure.text(valid[-1]["loss"]) if valid else "",
                f"{last['lr']:g}",
                f"{last['seconds']:,.0f}",
            ]
        table.add_row(job.label, job.state, *cells)
    return Constrain(table, width - 3)
