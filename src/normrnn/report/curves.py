"""What the rows of one run come to: averages, curves, the gap between train and validation."""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

from normrnn.report.runs import Run
from normrnn.runs.rows import Row, epoch_averages, pooled


class Point(NamedTuple):
    """A loss and when it was reached."""

    updates: int
    seconds: float
    loss: float


def whole_epochs(run: Run) -> list[Row]:
    """The average of each epoch in training that has ended: the beginning of one says nothing about
    the rest."""
    return [row for row in epoch_averages(run.rows) if row["epoch"] <= run.epochs_done]


def between_validations(run: Run) -> list[Row]:
    """The running average in training from one validation to the next; before the first
    validation, the rows as they are."""
    parts: list[list[Row]] = [[]]
    for row in run.rows:
        if row["split"] == "train":
            parts[-1].append(row)
        elif row["split"] == "valid" and parts[-1]:
            parts.append([])
    closed = parts[:-1]
    return pooled(closed) if closed else parts[0]


def trailing_average(run: Run) -> list[Point]:
    """The training loss averaged over the last epoch's worth of tokens, at every train row.

    Single rows are too noisy to ask when a loss was first reached, and a text is not equally hard
    everywhere: an epoch's worth has every part of it once. None before the first epoch has ended.
    """
    rows = run.split("train")
    if not rows or not run.epochs_done:
        return []
    epoch_count = sum(row["count"] for row in rows if row["epoch"] == rows[0]["epoch"])
    points, first, nats, count = [], 0, 0.0, 0
    for row in rows:
        nats += row["loss"] * row["count"]
        count += row["count"]
        while count - rows[first]["count"] >= epoch_count:
            nats -= rows[first]["loss"] * rows[first]["count"]
            count -= rows[first]["count"]
            first += 1
        if count >= epoch_count:
            points.append(Point(row["updates"], row["seconds"], nats / count))
    return points


def validations(run: Run) -> list[Point]:
    """The losses on validation, with the statistics that serve a user."""
    rows = run.split("valid", run.serving)
    return [Point(row["updates"], row["seconds"], row["loss"]) for row in rows]


def best(run: Run, split: str, statistics: str, key: str = "loss") -> Row | None:
    """The row with the lowest loss, or the lowest of something else."""
    rows = [row for row in run.split(split, statistics) if key in row]
    return min(rows, key=lambda row: row[key], default=None)


def first_below(points: Sequence[Point], loss: float) -> Point | None:
    """The first point at or below a loss."""
    return next((p for p in points if p.loss <= loss), None)


def gap(run: Run) -> list[Row]:
    """Validation loss minus running training loss, at every validation; none if that loss is no
    measure."""
    if run.looks_ahead:
        return []
    held_out = {row["updates"]: row["loss"] for row in run.split("valid", run.serving)}
    return [
        {**row, "gap": held_out[row["updates"]] - row["loss"]}
        for row in between_validations(run)
        if row["updates"] in held_out
    ]


def rate(run: Run) -> float | None:
    """Tokens or frames trained on in a second."""
    rows = run.split("train")
    seconds = rows[-1]["seconds"] if rows else 0
    return sum(r["count"] for r in rows) / seconds if seconds > 0 else None


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation.

    >>> spread([1.0, 2.0, 3.0], 1)
    '2.0 ± 1.0'
    """
    around = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):,.{digits}f}{around}"
