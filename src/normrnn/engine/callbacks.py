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
            self.write(self.rows, anew=True)
        elif row is not None:
            self.rows.append(row)
            self.write([row], anew=False)

    def write(self, rows: Sequence[Row], anew: bool) -> None:
        """Write more rows; `anew`: in the place of what an earlier process wrote."""
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

    def write(self, rows: Sequence[Row], anew: bool) -> None:
        """Write every number of the rows."""
        if anew:
            self._begin(rows)
        for row in rows:
            kind = row["split"] + (f" {row['statistics']}" if "statistics" in row else "")
            at = self.start + row["seconds"]
            for name, value in row.items():
                if isinstance(value, float) and name != "seconds":
                    self.writer.add_scalar(f"{name}/{kind}", value, row["updates"], walltime=at)

    def _begin(self, rows: Sequence[Row]) -> None:
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

    def close(self) -> None:
        """Write what is pending."""
        if self.writer is not None:
            self.writer.close()


class CSV(RowLog):
    """RUN/metrics.csv, with a column for every key that a row has had."""

    columns: Sequence[str] = ()

    def write(self, rows: Sequence[Row], anew: bool) -> None:
        """Write rows; a row with a new key makes the file new."""
        if anew or not rows[0].keys() <= set(self.columns):
            rows, anew = self.rows or [], True
            self.columns = list(dict.fromkeys(key for row in rows for key in row))
        path, mode = self.run / CSV_FILE, "w" if anew else "a"
        with open(path, mode, newline="", encoding="utf-8", opener=following_no_link) as file:
            writer = csv.DictWriter(file, self.columns, restval="")
            if anew:
                writer.writeheader()
            writer.writerows(rows)


LOGS: dict[str, type[RowLog]] = {"tensorboard": TensorBoard, "csv": CSV}
