"""The rows of a run for tensorboard, beside whatever else shows it."""

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from normrnn.config.measure import Measure
from normrnn.engine.display import Display, Status
from normrnn.errors import UserError
from normrnn.extras import install_command
from normrnn.files import utf8_name
from normrnn.runs.names import METRICS
from normrnn.runs.rows import read_rows

DIRECTORY = "tensorboard"
SCALARS = ("loss", "bpc", "fer", "error", "batch_ppl", "grad_norm", "lr")


def require_tensorboard() -> None:
    """UserError where the package is missing or cannot be imported."""
    try:
        for name in ("tensorboard", "torch.utils.tensorboard"):
            importlib.import_module(name)
    except ImportError as error:
        command = install_command("report")
        raise UserError(f"--tensorboard needs tensorboard ({error}): {command}") from None


class TensorBoard:
    """Writes RUN/tensorboard from metrics.jsonl, then every new row.

    Written anew when a run goes on: what the resume cut off is gone, nothing is there twice, and
    switching it on later shows the run from its first row.
    """

    def __init__(self, run: Path) -> None:
        require_tensorboard()
        utf8_name(run, "--tensorboard")
        self.run = run
        self.writer: Any = None
        self.start = 0.0

    def row(self, row: dict[str, Any]) -> None:
        """One more row, already in metrics.jsonl."""
        if self.writer is None:
            self.rewrite()
        else:
            self._add(row)

    def rewrite(self) -> None:
        """All rows of metrics.jsonl."""
        from torch.utils.tensorboard import SummaryWriter

        rows = read_rows(self.run / METRICS)
        directory = self.run / DIRECTORY
        if directory.is_symlink():  # old files in it are removed: they might be another's
            raise UserError(f"{directory} is a link: not writing through it")
        for old in directory.glob("events.out.tfevents.*"):
            old.unlink()
        # So that tensorboard's relative time is the run's own.
        self.start = time.time() - (rows[-1]["seconds"] if rows else 0)
        # A viewer that is open forgets what it has read.
        self.writer = SummaryWriter(str(directory), purge_step=0, flush_secs=10)
        for row in rows:
            self._add(row)

    def complete(self) -> None:
        """Write a run that had finished before it was watched."""
        if self.writer is None:
            self.rewrite()

    def close(self) -> None:
        """Write out what is pending."""
        if self.writer is not None:
            self.writer.close()

    def _add(self, row: dict[str, Any]) -> None:
        kind = row["split"] + (f" {row['statistics']}" if "statistics" in row else "")
        kind += f" {row['streams']} stream" if row.get("streams") == 1 else ""
        at = self.start + row["seconds"]
        for name in SCALARS:
            if name in row:
                self.writer.add_scalar(f"{name}/{kind}", row[name], row["updates"], walltime=at)


class Both:
    """A display, and the rows for tensorboard as well."""

    def __init__(self, display: Display, board: TensorBoard) -> None:
        self.display = display
        self.board = board

    def __enter__(self) -> "Both":
        self.display.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.display.__exit__(*error)

    def update(self, status: Status) -> None:
        """Tensorboard gets rows only."""
        self.display.update(status)

    def row(self, row: dict[str, Any]) -> None:
        """The display shows it, tensorboard keeps it."""
        self.display.row(row)
        self.board.row(row)


def beside(
    display: Callable[[int, Measure], Display], board: TensorBoard
) -> Callable[[int, Measure], Display]:
    """The display with tensorboard beside it."""
    return lambda epochs, measure: Both(display(epochs, measure), board)
