"""`normrnn.verdict`: compare the variants of run directories or of a user's own rows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from normrnn.config.measure import Measure
from normrnn.errors import UsageError
from normrnn.reporting.groups import Group, groups, without_repeats
from normrnn.reporting.runs import Run, find
from normrnn.runs.rows import Row
from normrnn.verdicts.result import Verdict, verdict_of
from normrnn.verdicts.rows import BASELINE, PlainRun, Point, read_rows
from normrnn.verdicts.verdict import Settings

LONG_ENOUGH = 30.0
"""Seconds that a run must take for its speed to be compared."""


def verdict(
    rows: Any,
    baseline: str | None = None,
    paired: bool = False,
    higher_is_better: bool = False,
    target: float | None = None,
    margin: float = 0.01,
) -> Verdict:
    """Compare every variant with the baseline: quality on test data, and speed on validation data.

    Args:
        rows: A list of dicts, a dict of lists, a DataFrame, or the path of a CSV file with columns
            variant, seed, step, split, value and optionally seconds and lr; or run directories,
            or runs.
        baseline: Name of the variant to compare with; by default "none", else the first.
        paired: Whether runs of one seed share initial weights and the order of data. Run
            directories say so themselves.
        higher_is_better: Whether larger values are better.
        target: A validation value to reach, instead of one that every run reaches.
        margin: Differences below this share of the baseline's value count as equivalent.

    >>> rows = [
    ...     {"variant": name, "seed": seed, "step": step, "split": "valid", "value": loss / step}
    ...     for name, loss in (("none", 2.0), ("frame", 1.0))
    ...     for seed in (1, 2, 3)
    ...     for step in (1, 2 + seed / 10)
    ... ]
    >>> verdict(rows, paired=True).variants["frame"].quality.answer
    'better'
    """
    found = verdicts(
        rows,
        baseline=baseline,
        paired=paired,
        higher_is_better=higher_is_better,
        target=target,
        margin=margin,
    )
    if len(found) > 1:
        raise UsageError("runs of different experiments: " + "; ".join(one.title for one in found))
    return found[0]


def verdicts(
    rows: Any,
    *,
    baseline: str | None = None,
    paired: bool = False,
    higher_is_better: bool = False,
    target: float | None = None,
    margin: float = 0.01,
) -> list[Verdict]:
    """Compare the variants of several experiments: one verdict each."""
    if isinstance(rows, list | tuple) and len(rows) == 1 and isinstance(rows[0], str | Path):
        rows = rows[0]
    runs = _runs(rows)
    if runs is None:
        plain = read_rows(rows)
        paired = paired or all(run.paired for run in plain)
        settings = Settings(paired, higher_is_better, target, margin)
        return [verdict_of(plain, baseline, settings)]
    if higher_is_better or (paired and not is_paired(runs)):
        raise UsageError(
            "paired and higher_is_better are for rows: run directories say themselves what they are"
        )
    found = groups(runs)
    if not found:
        raise UsageError("no runs found")
    return group_verdicts(found, baseline=baseline, target=target, margin=margin)


def group_verdicts(found: Sequence[Group], titled: bool = False, **options: Any) -> list[Verdict]:
    """Return a verdict per group; with titles if there are several, or if asked for."""
    answers = [group_verdict(group, **options) for group in found]
    if len(found) < 2 and not titled:
        return answers
    return [replace(a, title=g.title) for a, g in zip(answers, found, strict=True)]


def group_verdict(
    group: Group, baseline: str | None = None, target: float | None = None, margin: float = 0.01
) -> Verdict:
    """Compare the variants of a group of comparable runs."""
    plain = plain_runs(group)
    if not have_comparable_seconds(group.runs):
        for run in plain:
            for name, points in run.splits.items():
                run.splits[name] = [point._replace(seconds=None) for point in points]
    measure = group.measure
    paired = all(run.paired for run in plain)
    settings = Settings(paired, measure.higher_is_better, target, margin)
    return verdict_of(plain, baseline, settings, measure.name)


def _runs(rows: Any) -> list[Run] | None:
    """Return runs if directories or runs were given; None for rows."""
    one = isinstance(rows, str | Path | Run)
    several: Sequence[Any] = [rows] if one else rows if isinstance(rows, list | tuple) else []
    if not several or not all(isinstance(item, str | Path | Run) for item in several):
        return None
    if one and not isinstance(rows, Run) and Path(rows).is_file():
        return None
    runs = [item for item in several if isinstance(item, Run)]
    places = [Path(item) for item in several if not isinstance(item, Run)]
    found = find(places) if places else []
    found = without_repeats(found)
    broken = [f"{item.path} {item.problem}" for item in found if item.problem]
    if broken:
        raise UsageError("; ".join(broken))
    return [*runs, *(item.run for item in found if item.run is not None)]


def plain_runs(group: Group) -> list[PlainRun]:
    """Return the runs of a group as plain values in the unit of the task; arms are variants.

    The first baseline is called "none", even if its settings differ from those of others.
    """
    found = []
    for number, arm in enumerate(group.arms):
        name = arm.name
        if number == 0 and not arm.runs[0].normalisation.normalises:
            name = BASELINE
        found += [_plain(run, name, group.measure) for run in arm.runs]
    paired = is_paired(group.runs)
    return [replace(run, paired=paired) for run in found]


def is_paired(runs: Sequence[Run]) -> bool:
    """Whether runs of one seed share their initial weights, batches and masks."""
    return all(run.config.get("shared_initialisation") is True for run in runs)


def have_comparable_seconds(runs: Sequence[Run]) -> bool:
    """Whether all ran on the same machine, device and software, long enough to be timed, and at a
    steady rate: seconds per update of one norm within a quarter of each other."""
    places = [(run.environments, run.settings.get("device")) for run in runs]
    same = all(place == places[0] and place[0] for place in places)
    if not same or any(run.seconds < LONG_ENOUGH or not run.updates for run in runs):
        return False
    rates: dict[str, list[float]] = {}
    for run in runs:
        rates.setdefault(run.norm, []).append(run.seconds / run.updates)
    return all(max(some) <= 1.25 * min(some) for some in rates.values())


def _plain(run: Run, variant: str, measure: Measure) -> PlainRun:
    rate, rates = None, {}
    for row in run.rows:
        rate = row.get("lr", rate)
        rates[row["updates"]] = rate

    def points(rows: Sequence[Row]) -> list[Point]:
        return [
            Point(r["updates"], measure.convert(r["loss"]), r["seconds"], rates[r["updates"]])
            for r in rows
        ]

    tests = {row["updates"]: row for row in run.split("test", saved_statistics(run))}
    splits = {
        "valid": points(run.split("valid", run.serving)),
        "test": points(list(tests.values())),
        "train_eval": points(run.split("train_eval", run.serving)),
    }
    splits = {name: some for name, some in splits.items() if some}
    return PlainRun(variant, run.seed, splits, bool(run.diverged))


def saved_statistics(run: Run) -> str:
    """The kind of statistics that the selected model was saved with.

    Runs that did not record it are judged by the same rule: the better kind on validation data at
    the update of the best validation.
    """
    for row in run.rows:
        if row.get("saved") is True:
            return row["statistics"]
    valid = run.split("valid", run.serving)
    if not valid:
        return run.serving
    at = min(valid, key=lambda row: row["loss"])["updates"]
    kinds = {
        row["statistics"]: row["loss"]
        for row in run.split("valid")
        if row["updates"] == at and row.get("statistics") != "batch"
    }
    return min(kinds, key=lambda kind: (kinds[kind], kind != run.serving))
