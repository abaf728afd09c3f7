"""Displays of a run: live on a terminal, plain lines elsewhere."""

import time
from dataclasses import dataclass
from typing import Self

from normrnn.config.measure import Measure
from normrnn.runs.rows import Row

_COLUMNS = 80
"""Width of a terminal or of a log."""
_WIDE = 100
"""Columns of a terminal that also shows the bar and the learning rate."""


@dataclass(frozen=True)
class Status:
    """State of a run after an update."""

    epoch: int
    index: int
    epoch_updates: int
    updates: int
    seconds: float
    loss: float
    count: int
    lr: float
    error_rate: float | None = None
    """Share of wrong predictions, where they are counted."""


class Display:
    """What the loop calls to show a run; this one shows nothing."""

    def __init__(self, epochs: int, measure: Measure) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def update(self, status: Status) -> None:
        """After every update."""

    def row(self, row: Row) -> None:
        """After every row of metrics.jsonl."""


class _WithSpeed(Display):
    """Speed and time left, from the updates of this process.

    `statistics`: whether to show the kind of statistics.
    """

    def __init__(self, epochs: int, measure: Measure, statistics: bool = True) -> None:
        self.epochs, self.measure, self.statistics = epochs, measure, statistics
        self.first: Status | None = None
        self.last: Status | None = None
        self.began, self.total = 0.0, 0

    def update(self, status: Status) -> None:
        """Record the status."""
        if self.first is None:
            self.first, self.began = status, time.monotonic()
        self.last = status
        self.total += status.count

    def _quality(self, status: Status) -> str:
        """Return the loss of a status, with its error rate where there is one."""
        key = (self.measure.error_rate or ("",))[0]
        return self.measure.quality(status.loss, {key: status.error_rate}, 3)

    def speed(self) -> str:
        """Return targets per second and time left, in words."""
        first, last = self.first, self.last
        if first is None or last is None or last.updates == first.updates:
            return ""
        seconds = last.seconds - first.seconds
        rate = (self.total - first.count) / seconds
        remaining = self.epochs * last.epoch_updates - (
            (last.epoch - 1) * last.epoch_updates + last.index
        )
        # By the clock, because validations and checkpoints take time too.
        left = remaining * (time.monotonic() - self.began) / (last.updates - first.updates)
        return f"{rate:,.0f} {self.measure.unit}/s  {duration(left)} left"


class PlainDisplay(_WithSpeed):
    """One line per row of metrics.jsonl."""

    def row(self, row: Row) -> None:
        """Print a row; a train row with speed and time left, where they fit."""
        text = describe(row, self.epochs, self.measure, self.statistics)
        if row["split"] == "train":
            speed = self.speed()
            rate, _, left = speed.partition("  ")
            ends = (f"{text}  {speed}", f"{text}  {left}", f"{text}  {rate}")
            text = next((line for line in ends if len(line) <= _COLUMNS), text)
        print(text, flush=True)


class LiveDisplay(_WithSpeed):
    """One line for the epoch, with validations as lines above it.

    A terminal of less than 100 columns has neither the bar nor the learning rate.
    """

    def __init__(self, epochs: int, measure: Measure, statistics: bool = True) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        from normrnn.console import PlainConsole

        super().__init__(epochs, measure, statistics)
        one_line = Column(no_wrap=True, overflow="ellipsis")
        state = TextColumn("{task.fields[state]}", table_column=one_line)
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), state)
        self.bar = Progress(*columns, console=PlainConsole(), transient=True)
        self.wide = self.bar.console.width >= _WIDE
        if self.wide:
            self.bar.columns = (columns[0], BarColumn(bar_width=24), *columns[1:])
        self.task = self.bar.add_task("", total=None, state="", visible=False)
        self.drawn = 0.0

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def update(self, status: Status) -> None:
        """Redraw, a few times a second at most."""
        super().update(status)
        now = time.monotonic()
        if now - self.drawn < 0.2 and status.index < status.epoch_updates:
            return
        self.drawn = now
        self.bar.update(
            self.task,
            description=f"epoch {status.epoch}/{self.epochs}",
            completed=status.index,
            total=status.epoch_updates,
            visible=True,
            state=f"{self._quality(status)}"
            f"{f'  lr {status.lr:g}' if self.wide else ''}  {self.speed()}",
        )

    def row(self, row: Row) -> None:
        """Print validations above the bar, which shows train rows."""
        if row["split"] != "train":
            text = describe(row, self.epochs, self.measure, self.statistics)
            self.bar.console.print(text, soft_wrap=True)


def describe(row: Row, epochs: int, measure: Measure, statistics: bool = True) -> str:
    """Format a row of metrics.jsonl as a line, with or without its kind of statistics.

    >>> from normrnn.config.measure import NATS
    >>> row = {"epoch": 1, "updates": 9, "split": "valid", "statistics": "batch", "loss": 5.0}
    >>> describe(row, 15, NATS)
    'epoch 1/15  update 9  valid (batch)  loss 5.0000'
    """
    kind = f" ({row['statistics']})" if statistics and "statistics" in row else ""
    text = f"epoch {row['epoch']}/{epochs}  update {row['updates']}  {row['split']}{kind}"
    text += f"  {measure.quality(row['loss'], row, 4)}"
    return f"{text}  lr {row['lr']:.3g}" if "lr" in row else text


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds.

    >>> duration(3725)
    '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
