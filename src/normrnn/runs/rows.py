"""Read the rows of metrics.jsonl, and average over several."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from normrnn.errors import UserError
from normrnn.files import ROWS, read_regular
from normrnn.runs.note import metrics_as_written

Row = dict[str, Any]
"""One line of metrics.jsonl."""


def read_rows(path: Path) -> list[Row]:
    """Return the complete rows of a metrics file; none if there is no file yet."""
    rows, problem = parse_rows(path)
    if problem:
        raise UserError(f"{path} is damaged: {problem}")
    return rows


def parse_rows(path: Path) -> tuple[list[Row], str]:
    """Return the rows up to the first invalid one, and the problem with that."""
    if metrics_as_written(path.parent) is False:
        return [], f"{path.name} is not what was written"
    if not path.exists():
        return [], ""
    try:
        text = read_regular(path, ROWS).decode("utf-8", "replace")
    except OSError as error:
        return [], f"{path.name} cannot be read: {error.strerror}"
    *complete, _torn = text.split("\n")
    rows: list[Row] = []
    for number, line in enumerate(complete, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if row is None or not _is_row(row) or (rows and row["updates"] < rows[-1]["updates"]):
            return rows, f"line {number} of {path.name} is not a row of metrics"
        rows.append(row)
    return rows, ""


_LARGEST = 1e300  # beyond it, sums overflow; NaN is not below it either
_NUMBERS = ("updates", "epoch", "loss", "count", "seconds")
_OPTIONAL = ("lr", "fer", "error", "bpc", "batch_ppl", "grad_norm")


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("split"), str):
        return False
    if not all(type(row.get(key)) in (int, float) for key in _NUMBERS):
        return False
    known = [row[key] for key in (*_NUMBERS, *_OPTIONAL) if key in row]
    if not all(type(value) in (int, float) and abs(value) < _LARGEST for value in known):
        return False
    return row["count"] > 0 and row["updates"] >= 0 and row["epoch"] > 0


def finite_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with a finite loss; JSON has no other numbers."""
    return [row for row in rows if math.isfinite(row["loss"])]


def left_out(rows: Iterable[Row]) -> list[str]:
    """Describe the rows that `finite_rows` leaves out."""
    return [
        f"{row['split']} with {row['statistics']} statistics left out: its loss is {row['loss']}"
        for row in rows
        if not math.isfinite(row["loss"])
    ]


def epoch_averages(rows: Iterable[Row]) -> list[Row]:
    """Return epoch and loss, the running average in training over targets, of every epoch."""
    sums: dict[int, tuple[float, int]] = {}
    for row in rows:
        if row["split"] == "train":
            total, count = sums.get(row["epoch"], (0.0, 0))
            sums[row["epoch"]] = total + row["loss"] * row["count"], count + row["count"]
    return [{"epoch": epoch, "loss": total / count} for epoch, (total, count) in sums.items()]
