"""How two arms of an experiment compare: the figures behind the tables and the sentences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, stdev
from typing import NamedTuple

from normrnn.report.measure import measure
from normrnn.report.runs import Row, Run


class Point(NamedTuple):
    """A loss and when it was reached."""

    updates: int
    seconds: float
    loss: float


def epoch_averages(run: Run) -> list[Row]:
    """The running average of each epoch in training: loss over its tokens, `batch_ppl` over its
    mini-batches, at the epoch's end."""
    parts: dict[int, list[Row]] = {}
    for row in run.split("train"):
        parts.setdefault(row["epoch"], []).append(row)
    return _pooled(list(parts.values()))


def whole_epochs(run: Run) -> list[Row]:
    """The same without an epoch that has not ended: its beginning says nothing about the rest."""
    return [row for row in epoch_averages(run) if row["epoch"] <= run.epochs_done]


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
    return _pooled(closed) if closed else parts[0]


def _pooled(parts: Sequence[list[Row]]) -> list[Row]:
    pooled: list[Row] = []
    before = 0
    for part in parts:
        updates = [before, *(row["updates"] for row in part)]
        counts = [row["count"] for row in part]
        steps = [b - a for a, b in pairwise(updates)]
        row = {key: part[-1][key] for key in ("epoch", "updates", "seconds")}
        row |= {"count": sum(counts), "loss": _weighted(part, "loss", counts)}
        if all("batch_ppl" in r for r in part):
            row["batch_ppl"] = _weighted(part, "batch_ppl", steps)
        if all("fer" in r for r in part):
            row["fer"] = _weighted(part, "fer", counts)
        pooled.append(row)
        before = updates[-1]
    return pooled


def _weighted(rows: Sequence[Row], key: str, weights: Sequence[int]) -> float:
    return sum(r[key] * w for r, w in zip(rows, weights, strict=True)) / sum(weights)


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
    return sum(r["count"] for r in rows) / rows[-1]["seconds"] if rows and run.seconds else None


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation.

    >>> spread([1.0, 2.0, 3.0], 1)
    '2.0 ± 1.0'
    """
    around = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):,.{digits}f}{around}"


@dataclass(frozen=True)
class Saving:
    """What one arm needs to reach the baseline's best loss, in training where that is one, beside
    what that needed."""

    loss: float
    baseline: Point
    other: Point | None
    where: str = "training"


def pairs(baselines: Sequence[Run], others: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Baseline and other arm, once per seed that both have."""
    by_seed = {run.seed: run for run in reversed(others)}
    first = {run.seed: run for run in reversed(baselines)}
    return [(first[seed], by_seed[seed]) for seed in sorted(first.keys() & by_seed.keys())]


def savings(baselines: Sequence[Run], others: Sequence[Run]) -> list[Saving]:
    """One per seed that both arms have, once both have trained for an epoch."""
    found = []
    for run, other in pairs(baselines, others):
        where, when = _followed(other)
        points, others_points = when(run), when(other)
        if points and others_points:
            lowest = min(points, key=lambda p: p.loss)
            reached = first_below(others_points, lowest.loss)
            found.append(Saving(lowest.loss, lowest, reached, where))
    return found


def network(norm: str) -> str:
    """An arm in words."""
    names = {"none": "baseline", "hidden": "network normalised inside the recurrence"}
    wise = {"frame", "sequence"}
    return names.get(norm) or f"{norm}{'-wise' if norm in wise else ''} normalised network"


def verdict(runs: Sequence[Run]) -> list[str]:
    """Per normalised arm: what it saved in training, and what that did to validation."""
    baselines = [run for run in runs if run.norm == "none"]
    norms = list(dict.fromkeys(run.norm for run in runs if run.norm != "none"))
    return [_arm_verdict(n, baselines, [r for r in runs if r.norm == n]) for n in norms]


def _arm_verdict(norm: str, baselines: Sequence[Run], others: Sequence[Run]) -> str:
    every = pairs(baselines, others)
    if baselines and not every:
        return f"No seed is common to the baseline and the {network(norm)}: no verdict."
    both = _comparable(every)
    going = not any(all(run.finished for run in pair) for pair in every)
    found = savings(*([pair[i] for pair in both] for i in (0, 1)))
    parts = [sentence(norm, found, compared=bool(both), going=going)]
    if any(s.other is None for s in found):
        parts.append(lead(both))
    parts += [speeds(both)] if both and not found else [validation(both)] if both else []
    if going and found:
        parts.append(
            "Not all of these runs have finished: compared are the updates that both have, and"
            " this can still change."
        )
    if both and any(other.looks_ahead for _, other in both):
        parts.append(
            "Its training loss is not compared: while it trains, its statistics see the words that"
            " it is to predict."
        )
    if left := len(every) - len(both):
        parts.append(f"{left} more seed{'s' if left > 1 else ''} had not finished.")
    return " ".join(part for part in parts if part)


def _comparable(both: Sequence[tuple[Run, Run]]) -> list[tuple[Run, Run]]:
    """Pairs that have finished, or all, as far as both got, where none has."""
    finished = [pair for pair in both if all(run.finished for run in pair)]
    return finished or [_as_far(*pair) for pair in both]


def _as_far(*runs: Run) -> tuple[Run, Run]:
    """Both runs up to the last update that both have."""
    last = min(run.updates for run in runs)
    a, b = (replace(r, rows=[row for row in r.rows if row["updates"] <= last]) for r in runs)
    return a, b


def sentence(
    norm: str, found: Sequence[Saving], *, compared: bool = False, going: bool = False
) -> str:
    """What the normalised arm saved, in plain words.

    `compared`: there is a baseline, even if nothing was found; `going`: a run is not finished.
    """
    if not found and compared:
        return f"The baseline and the {network(norm)} have not both trained for an epoch yet."
    if not found:
        return f"There is no baseline to compare the {network(norm)} with yet."
    reached = [(s.baseline, s.other) for s in found if s.other is not None]
    seeds = f" (mean of {len(reached)} seeds)" if len(reached) > 1 else ""
    loss = f"best {found[0].where} loss of {mean(s.loss for s in found):.3f} nats"
    if len(reached) < len(found):
        of = f" in {len(found) - len(reached)} of {len(found)} seeds" if len(found) > 1 else ""
        return (
            f"No saving{' so far' if going else ''}: the {network(norm)} did not reach the"
            f" baseline's {loss}{of}."
        )
    updates = 1 - mean(o.updates / b.updates for b, o in reached)
    seconds = 1 - mean(o.seconds / b.seconds for b, o in reached)
    but = "and" if (updates > 0) == (seconds > 0) else "but"
    return (
        f"{'' if updates > 0 else 'No saving: '}{'T' if updates > 0 else 't'}o reach the baseline's"
        f" {loss}, the {network(norm)} needed"
        f" {_less(updates, 'fewer', 'many')} updates {but}"
        f" {_less(seconds, 'less', 'much')} time{seeds}:"
        f" {mean(o.updates for _, o in reached):,.0f} instead of"
        f" {mean(b.updates for b, _ in reached):,.0f} updates,"
        f" {mean(o.seconds for _, o in reached):,.0f} instead of"
        f" {mean(b.seconds for b, _ in reached):,.0f} seconds"
        " (seconds also depend on what else the machine was doing)."
    )


def lead(both: Sequence[tuple[Run, Run]]) -> str:
    """How long the normalised arm was ahead from the start; empty if it was not, or always is."""
    ends, where = [], ""
    for runs in both:
        where, when = _followed(runs[1])
        base, other = ({p.updates: p.loss for p in when(run)} for run in runs)
        common = sorted(base.keys() & other.keys())
        behind = next((i for i, at in enumerate(common) if other[at] >= base[at]), 0)
        if not behind:
            return ""
        ends.append(common[behind - 1])
    return (
        f"At the same number of updates its {where} loss was the lower one until update"
        f" {spread(ends, 0)}."
    )


def _followed(run: Run) -> tuple[str, Callable[[Run], list[Point]]]:
    """The loss by which an arm is compared: in training, where that is a measure."""
    return ("validation", validations) if run.looks_ahead else ("training", trailing_average)


def speeds(both: Sequence[tuple[Run, Run]]) -> str:
    """How fast both arms train; empty before the first rows."""
    rates = [(a, b) for x, y in both if (a := rate(x)) and (b := rate(y))]
    if not rates:
        return ""
    base, other = (mean(pair[i] for pair in rates) for i in (0, 1))
    unit = measure([run for pair in both for run in pair]).unit
    return (
        f"In {min(run.updates for pair in both for run in pair):,} updates the normalised network"
        f" processed {other:,.0f} {unit} a second, {other / base:.2f} times the baseline's"
        f" {base:,.0f} (which also depends on what else the machine was doing)."
    )


def validation(both: Sequence[tuple[Run, Run]]) -> str:
    """What happened to validation; empty if an arm has none yet."""
    shown = measure([run for pair in both for run in pair])
    losses = _paired(both, lambda run: best(run, "valid", run.serving), "loss")
    if not losses:
        return ""
    base, other = ([shown.of(pair[i]) for pair in losses] for i in (0, 1))
    change = mean(other) / mean(base) - 1
    word = f"{abs(change):.1%} {'better' if change < 0 else 'worse'}"
    place = "the dev set" if shown.held_out == "dev" else "validation"
    text = (
        f"Its best {shown.name} on {place} was {spread(other, shown.digits)} against the"
        f" baseline's {spread(base, shown.digits)}"
        f" ({word if abs(change) >= 0.0005 else 'the same'})"
    )
    errors = _paired(both, lambda run: best(run, "valid", run.serving, "fer"), "fer")
    if errors:
        ours, theirs = mean(b for _, b in errors), mean(a for a, _ in errors)
        text += f", its best frame error rate {ours:.1%} against {theirs:.1%}"
    gaps = [last for pair in both if (last := _last_gaps(*pair))]
    if gaps:
        ours, theirs = mean(b for _, b in gaps), mean(a for a, _ in gaps)
        more = "overfits more" if ours > theirs + 0.005 else "does not overfit more"
        text += (
            f"; it {more}: when both were last validated, its loss on {place} was {_apart(ours)}"
            f" its training loss, the baseline's {_apart(theirs)}"
        )
    return f"{text}."


def _paired(
    both: Sequence[tuple[Run, Run]], row: Callable[[Run], Row | None], key: str
) -> list[tuple[float, float]]:
    """A figure of both runs of each pair that has it."""
    rows = [(row(a), row(b)) for a, b in both]
    return [(a[key], b[key]) for a, b in rows if a is not None and b is not None]


def _last_gaps(baseline: Run, other: Run) -> tuple[float, float] | None:
    """The gaps at the last validation that both have."""
    a, b = ({row["updates"]: row["gap"] for row in gap(run)} for run in (baseline, other))
    last = max(a.keys() & b.keys(), default=None)
    return None if last is None else (a[last], b[last])


def statistics_sentence(runs: Sequence[Run]) -> str:
    """Whether the test statistics turn the comparison round; empty where that was not measured."""
    shown = measure(runs)
    norm = next((run.norm for run in runs if run.split("valid", "batch")), None)
    both = pairs([r for r in runs if r.norm == "none"], [r for r in runs if r.norm == norm])
    both = _comparable(
        [(a, b) for a, b in both if best(a, "valid", a.serving) and best(b, "valid", "batch")]
    )
    if not both or shown.name != "perplexity":
        return ""
    parts = []
    for kind, words in (
        ("batch", "With the validation mini-batch's own statistics, as the authors' code did,"),
        ("recalibrated", "with population statistics"),
    ):
        figures = [
            (shown.of(a["loss"]), shown.of(b["loss"]))
            for x, y in both
            if (a := best(x, "valid", x.serving)) and (b := best(y, "valid", kind))
        ]
        if figures:
            worse = sum(b > a for a, b in figures)
            apart = mean(b - a for a, b in figures)
            parts.append(
                f"{words} the {network(both[0][1].norm)}'s best validation perplexity is"
                f" {spread([b for _, b in figures], 1)}, {abs(apart):.1f}"
                f" {'above' if apart > 0 else 'below'} the baseline's"
                f" {spread([a for a, _ in figures], 1)} (worse in {worse} of {len(figures)}"
                f" {'seeds' if len(figures) > 1 else 'seed'})"
            )
    return f"{'; '.join(parts)}."


def _apart(nats: float) -> str:
    return f"{abs(nats):.2f} nats {'above' if nats > 0 else 'below'}"


def _less(share: float, less: str, much: str) -> str:
    if abs(share) < 0.005:
        return f"as {much}"
    return f"{abs(share):.0%} {less if share > 0 else 'more'}"
