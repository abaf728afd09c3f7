"""Displays of a run: live on a terminal, plain lines elsewhere."""

import time
from dataclasses import dataclass
from typing import Any, Self

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


class TextDisplay(Display):
    """A line per row of metrics.jsonl; with `bar` train rows are a progress bar below the others.

    `statistics`: whether to show the kind of statistics.
    """

    def __init__(
        self, epochs: int, measure: Measure, statistics: bool = True, bar: bool = False
    ) -> None:
        self.epochs, self.measure, self.statistics = epochs, measure, statistics
        self.first: Status | None = None
        self.last: Status | None = None
        self.began, self.total, self.drawn = 0.0, 0, 0.0
        self.bar = _bar() if bar else None

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, status: Status) -> None:
        """Record the status; redraw a few times a second at most."""
        now = time.monotonic()
        if self.first is None:
            self.first, self.began = status, now
        self.last = status
        self.total += status.count
        if self.bar is None or (now - self.drawn < 0.2 and status.index < status.epoch_updates):
            return
        self.drawn = now
        key = (self.measure.error_rate or ("",))[0]
        quality = self.measure.quality(status.loss, {key: status.error_rate}, 3)
        lr = f"  lr {status.lr:g}" if self.bar.console.width >= _WIDE else ""
        self.bar.update(
            self.bar.task_ids[0],
            description=f"epoch {status.epoch}/{self.epochs}",
            completed=status.index,
            total=status.epoch_updates,
            visible=True,
            state=f"{quality}{lr}  {self.speed()}",
        )

    def row(self, row: Row) -> None:
        """Print a row; a train row with speed and time left, where they fit."""
        text = describe(row, self.epochs, self.measure, self.statistics)
        if self.bar is not None:
            if row["split"] != "train":
                self.bar.console.print(text, soft_wrap=True)
            return
        if row["split"] == "train":
            speed = self.speed()
            rate, _, left = speed.partition("  ")
            ends = (f"{text}  {speed}", f"{text}  {left}", f"{text}  {rate}")
            text = next((line for line in ends if len(line) <= _COLUMNS), text)
        print(text, flush=True)

    def speed(self) -> str:
        """Return targets per second and time left, in words."""
        first, last = self.first, self.last
        if first is None or last is None or last.updates == first.updates:
            return ""
        rate = (self.total - first.count) / (last.seconds - first.seconds)
        remaining = (self.epochs - last.epoch + 1) * last.epoch_updates - last.index
        # By the clock, because validations and checkpoints take time too.
        left = remaining * (time.monotonic() - self.began) / (last.updates - first.updates)
        return f"{rate:,.0f} {self.measure.unit}/s  {duration(left)} left"


def _bar() -> Any:
    """Return a progress bar of one line; a narrow terminal has the text only."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    from normrnn.console import PlainConsole

    console = PlainConsole()
    state = Column(no_wrap=True, overflow="ellipsis")
    bar = Progress(
        TextColumn("{task.description}"),
        *([BarColumn(bar_width=24)] if console.width >= _WIDE else []),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", table_column=state),
        console=console,
        transient=True,
    )
    bar.add_task("", total=None, state="", visible=False)
    return bar


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
