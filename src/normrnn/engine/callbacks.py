"""Callbacks that get every row of a run: TensorBoard, CSV, or a user's own function."""

import csv
import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from normrnn.errors import UserError
from normrnn.extras import install_command
from normrnn.files import following_no_link, utf8_name
from normrnn.runs.rows import Row, read_rows

Callback = Callable[[Row], None]
"""Called with every row of metrics.jsonl, after it was written."""
TENSORBOARD = "tensorboard"
CSV_FILE = "metrics.csv"


def require_tensorboard() -> None:
    """Raise UserError where the package is missing or cannot be imported."""
    try:
        for name in ("tensorboard", "torch.utils.tensorboard"):
            importlib.import_module(name)
    except ImportError as error:
        command = install_command("report")
        raise UserError(f"--tensorboard needs tensorboard ({error}): {command}") from None


class RowLog:
    """Keeps a copy of the rows of a run in another format, in its directory.

    It is written anew when a run is resumed, from metrics.jsonl: rows that the resume removed are
    gone, none is there twice, and a log that is switched on later has all rows.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.rows: list[Row] | None = None

    def __call__(self, row: Row | None = None) -> None:
        """Add a row, which metrics.jsonl has already; the first time all rows that it has."""
        if self.rows is None:
            self.rows = read_rows(self.run)
            self.begin(self.rows)
        elif row is not None:
            self.rows.append(row)
            self.add(row)

    def begin(self, rows: Sequence[Row]) -> None:
        """Replace what an earlier process wrote by these rows."""
        raise NotImplementedError

    def add(self, row: Row) -> None:
        """Write one more row."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what is pending."""


class TensorBoard(RowLog):
    """Event files in RUN/tensorboard."""

    writer: Any = None
    start = 0.0

    def __init__(self, run: Path) -> None:
        require_tensorboard()
        utf8_name(run, "--tensorboard")
        super().__init__(run)

    def begin(self, rows: Sequence[Row]) -> None:
        """Replace what an earlier process wrote by these rows."""
        from torch.utils.tensorboard import SummaryWriter

        directory = self.run / TENSORBOARD
        if directory.is_symlink():  # files in it are removed
            raise UserError(f"{directory} is a symbolic link: not writing through it")
        for old in directory.glob("events.out.tfevents.*"):
            old.unlink()
        # The relative time that TensorBoard shows is then the run's own.
        self.start = time.time() - (rows[-1]["seconds"] if rows else 0)
        # purge_step: an open viewer drops what it has read.
        self.writer = SummaryWriter(str(directory), purge_step=0, flush_secs=10)
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Write one more row."""
        kind = row["split"] + (f" {row['statistics']}" if "statistics" in row else "")
        at = self.start + row["seconds"]
        for name, value in row.items():
            if isinstance(value, float) and name != "seconds":
                self.writer.add_scalar(f"{name}/{kind}", value, row["updates"], walltime=at)

    def close(self) -> None:
        """Write what is pending."""
        if self.writer is not None:
            self.writer.close()


class CSV(RowLog):
    """RUN/metrics.csv, with a column for every key that a row has had."""

    columns: Sequence[str] = ()

    def begin(self, rows: Sequence[Row]) -> None:
        """Replace what an earlier process wrote by these rows."""
        self.columns = list(dict.fromkeys(key for row in rows for key in row))
        self._write(rows, "w")

    def add(self, row: Row) -> None:
        """Write one more row."""
        if row.keys() <= set(self.columns):
            self._write([row], "a")
        else:
            self.begin(self.rows or [])

    def _write(self, rows: Sequence[Row], mode: str) -> None:
        path = self.run / CSV_FILE
        with open(path, mode, newline="", encoding="utf-8", opener=following_no_link) as file:
            writer = csv.DictWriter(file, self.columns, restval="")
            if mode == "w":
                writer.writeheader()
            writer.writerows(rows)


LOGS: dict[str, type[RowLog]] = {"tensorboard": TensorBoard, "csv": CSV}
