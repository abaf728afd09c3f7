"""Callbacks that get every row of a run: the display, TensorBoard, CSV, or a user's function."""

import csv
import io
import time
from collections.abc import Callable
from pathlib import Path

from normrnn.config.base import Config, Measure
from normrnn.errors import UserError
from normrnn.extras import import_extra
from normrnn.files import utf8_name, write_whole
from normrnn.runs import records
from normrnn.runs.records import Row, read_rows

Callback = Callable[[Row], None]  # called with every row of metrics.jsonl, after it was written


class Display:
    """Prints a line per row. `updates` is the number of updates of an epoch."""

    def __init__(self, config: Config, updates: int) -> None:
        self.config, self.updates = config, updates
        self.began, self.first = 0.0, 0

    def __call__(self, row: Row) -> None:
        """Print a row; a train row with the time left, known from the second one on."""
        config, updates = self.config, row["updates"]
        keeps = config.normalisation.keeps_statistics
        text = describe(row, config.epochs, config.loss_measure, keeps)
        if row["split"] == "train" and self.first:
            # By the clock, because validations and checkpoints take time too.
            each = (time.monotonic() - self.began) / (updates - self.first)
            text += f"  {duration((config.epochs * self.updates - updates) * each)} left"
        elif row["split"] == "train":
            self.first, self.began = updates, time.monotonic()
        print(text, flush=True)


def describe(row: Row, epochs: int, measure: Measure, statistics: bool = True) -> str:
    """Format a row of metrics.jsonl as a line, with or without its kind of statistics."""
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


def require_tensorboard() -> None:
    """Raise UserError where the package is missing or cannot be imported."""
    for name in ("tensorboard", "torch.utils.tensorboard"):
        import_extra(name, "report")


class TensorBoard:
    """Event files in RUN/tensorboard, written anew from metrics.jsonl when a run is resumed: rows
    that the resume removed are gone, and none is there twice."""

    def __init__(self, run: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        utf8_name(run, "--tensorboard")
        directory = run / "tensorboard"
        if directory.is_symlink():  # files in it are removed
            raise UserError(f"{directory} is a symbolic link: not writing through it")
        for old in directory.glob("events.out.tfevents.*"):
            old.unlink()
        rows = read_rows(run)
        # The relative time that TensorBoard shows is then the run's own.
        self.start = time.time() - (rows[-1]["seconds"] if rows else 0.0)
        # purge_step: an open viewer drops what it has read.
        self.writer = SummaryWriter(str(directory), purge_step=0, flush_secs=10)
        self.close = self.writer.close
        for row in rows:
            self(row)

    def __call__(self, row: Row) -> None:
        """Write every number of a row."""
        kind = row["split"] + (f" {row['statistics']}" if "statistics" in row else "")
        at = self.start + row["seconds"]
        for name, value in row.items():
            if isinstance(value, float) and name != "seconds":
                self.writer.add_scalar(f"{name}/{kind}", value, row["updates"], walltime=at)


class CSV:
    """RUN/metrics.csv, with a column for every key that a row has had; written whole at every
    validation and when the run stops."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def __call__(self, row: Row) -> None:
        """Write the file, unless the row is one of training."""
        if row["split"] != "train":
            self.close()

    def close(self) -> None:
        """Write the file."""
        rows = read_rows(self.run)
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self.run / records.CSV, text.getvalue().encode())


LOGS: dict[str, type[TensorBoard | CSV]] = {"tensorboard": TensorBoard, "csv": CSV}
