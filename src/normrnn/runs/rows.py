"""Read the rows of metrics.jsonl, and average over several."""

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
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


def epoch_averages(rows: Sequence[Row]) -> list[Row]:
    """Return a row per epoch with the running average in training: the loss over tokens,
    `batch_ppl` over mini-batches."""
    parts: dict[int, list[Row]] = {}
    for row in rows:
        if row["split"] == "train":
            parts.setdefault(row["epoch"], []).append(row)
    return pooled(list(parts.values()))


def pooled(parts: Sequence[list[Row]]) -> list[Row]:
    """Return one averaged row for each part of consecutive train rows."""
    averages: list[Row] = []
    before = 0
    for part in parts:
        updates = [before, *(row["updates"] for row in part)]
        counts = [row["count"] for row in part]
        steps = [b - a for a, b in pairwise(updates)]
        row = {key: part[-1][key] for key in ("epoch", "updates", "seconds")}
        row |= {"count": sum(counts), "loss": _weighted(part, "loss", counts)}
        if all("batch_ppl" in r for r in part):
            row["batch_ppl"] = _weighted(part, "batch_ppl", steps)
        for key in ("fer", "error"):
            if all(key in r for r in part):
                row[key] = _weighted(part, key, counts)
        averages.append(row)
        before = updates[-1]
    return averages


def _weighted(rows: Sequence[Row], key: str, weights: Sequence[int]) -> float:
    return sum(r[key] * w for r, w in zip(rows, weights, strict=True)) / sum(weights)
