"""How two arms of an experiment compare: the figures behind the table and the sentence."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple

from normrnn.report.runs import Row, Run


class Point(NamedTuple):
    """A training loss and when it was reached."""

    updates: int
    seconds: float
    loss: float


def epoch_averages(run: Run) -> list[Row]:
    """The running average of each epoch in training: loss over its tokens, `batch_ppl` over its
    mini-batches, at the epoch's end."""
    epochs: list[Row] = []
    before = 0
    for row in run.split("train"):
        if not epochs or epochs[-1]["epoch"] != row["epoch"]:
            epochs.append({"epoch": row["epoch"], "nats": 0.0, "count": 0, "ppl": 0.0, "n": 0})
        sums, n = epochs[-1], row["updates"] - before
        before = row["updates"]
        sums["nats"] += row["loss"] * row["count"]
        sums["count"] += row["count"]
        sums["ppl"] += row["batch_ppl"] * n
        sums["n"] += n
        sums |= {"updates": row["updates"], "seconds": row["seconds"]}
    return [
        {
            **{key: sums[key] for key in ("epoch", "updates", "seconds", "count")},
            "loss": sums["nats"] / sums["count"],
            "batch_ppl": sums["ppl"] / sums["n"],
        }
        for sums in epochs
    ]


def trailing_average(run: Run) -> list[Point]:
    """The training loss averaged over the last epoch's worth of tokens, at every train row.

    Single rows are too noisy to ask when a loss was first reached, and a text is not equally hard
    everywhere: an epoch's worth has every part of it once.
    """
    rows = run.split("train")
    if not rows:
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


def best(run: Run, split: str, statistics: str) -> Row | None:
    """The row with the lowest loss."""
    return min(run.split(split, statistics), key=lambda row: row["loss"], default=None)


def first_below(points: Sequence[Point], loss: float) -> Point | None:
    """The first point at or below a loss."""
    return next((p for p in points if p.loss <= loss), None)


@dataclass(frozen=True)
class Saving:
    """What one arm needs to reach the baseline's best training loss, beside what that needed."""

    loss: float
    baseline: Point
    other: Point | None


def savings(baselines: Sequence[Run], others: Sequence[Run]) -> list[Saving]:
    """One per seed that both arms have."""
    by_seed = {run.config["seed"]: run for run in others}
    found = []
    for run in baselines:
        points = trailing_average(run)
        other = by_seed.get(run.config["seed"])
        if points and other is not None:
            lowest = min(points, key=lambda p: p.loss)
            reached = first_below(trailing_average(other), lowest.loss)
            found.append(Saving(lowest.loss, lowest, reached))
    return found


def verdict(runs: Sequence[Run]) -> list[str]:
    """One sentence per normalised arm."""
    baselines = [run for run in runs if run.norm == "none"]
    norms = list(dict.fromkeys(run.norm for run in runs if run.norm != "none"))
    return [
        sentence(norm, savings(baselines, [run for run in runs if run.norm == norm]))
        for norm in norms
    ]


def sentence(norm: str, found: Sequence[Saving]) -> str:
    """The verdict in plain words."""
    if not found:
        return f"There is no baseline to compare the {norm}-wise normalised network with yet."
    reached = [(s.baseline, s.other) for s in found if s.other is not None]
    seeds = f" (mean of {len(reached)} seeds)" if len(reached) > 1 else ""
    if len(reached) < len(found):
        of = f" in {len(found) - len(reached)} of {len(found)} seeds" if len(found) > 1 else ""
        return (
            f"The {norm}-wise normalised network did not reach the baseline's best training loss"
            f" of {found[0].loss:.3f}{of}."
        )
    loss = mean(s.loss for s in found)
    updates = 1 - mean(o.updates / b.updates for b, o in reached)
    seconds = 1 - mean(o.seconds / b.seconds for b, o in reached)
    first = "To reach the baseline's best training loss"
    return (
        f"{first} of {loss:.3f}, the {norm}-wise normalised network needed"
        f" {_less(updates, 'fewer', 'more')} updates and"
        f" {_less(seconds, 'less', 'more')} time{seeds}:"
        f" {mean(o.updates for _, o in reached):,.0f} instead of"
        f" {mean(b.updates for b, _ in reached):,.0f} updates,"
        f" {mean(o.seconds for _, o in reached):,.0f} instead of"
        f" {mean(b.seconds for b, _ in reached):,.0f} seconds."
    )


def _less(share: float, less: str, more: str) -> str:
    return f"{abs(share):.0%} {less if share >= 0 else more}"
