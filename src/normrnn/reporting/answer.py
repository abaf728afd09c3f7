"""`normrnn.verdict`: compare the variants of run directories or of a user's own rows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from normrnn.errors import UsageError
from normrnn.reporting.groups import Group, groups
from normrnn.reporting.runs import Row, Run, find
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
    found = verdicts(rows, baseline, Settings(paired, higher_is_better, target, margin))
    if len(found) > 1:
        raise UsageError("runs of different experiments: " + "; ".join(one.title for one in found))
    return found[0]


def verdicts(
    rows: Any, baseline: str | None = None, settings: Settings | None = None
) -> list[Verdict]:
    """Compare the variants of several experiments: one verdict each."""
    settings, runs = settings or Settings(), _runs(rows)
    if runs is None:
        return [verdict_of(read_rows(rows), baseline, settings)]
    if settings.higher_is_better or (settings.paired and not _is_paired(runs)):
        raise UsageError(
            "paired and higher_is_better are for rows: run directories say themselves what they are"
        )
    if not runs:
        raise UsageError("no runs found")
    return group_verdicts(groups(runs), baseline, settings)


def group_verdicts(
    found: Sequence[Group], baseline: str | None = None, settings: Settings | None = None
) -> list[Verdict]:
    """Return a verdict per group, with titles if there are several."""
    answers = [group_verdict(group, baseline, settings) for group in found]
    if len(found) < 2:
        return answers
    return [replace(a, title=g.title) for a, g in zip(answers, found, strict=True)]


def group_verdict(
    group: Group, baseline: str | None = None, settings: Settings | None = None
) -> Verdict:
    """Compare the variants of a group of comparable runs."""
    measure = group.measure
    settings = replace(
        settings or Settings(),
        paired=_is_paired(group.runs),
        higher_is_better=measure.higher_is_better,
    )
    return verdict_of(plain_runs(group), baseline, settings, measure.name)


def _runs(rows: Any) -> list[Run] | None:
    """Return runs if directories or runs were given; None for rows."""
    several = rows if isinstance(rows, list | tuple) else [rows]
    if not several or not all(isinstance(item, str | Path | Run) for item in several):
        return None
    if isinstance(rows, str | Path) and Path(rows).is_file():
        return None
    found = find([Path(item) for item in several if not isinstance(item, Run)])
    broken = [f"{item.path} {item.problem}" for item in found if item.problem]
    if broken:
        raise UsageError("; ".join(broken))
    runs = [item for item in several if isinstance(item, Run)]
    return [*runs, *(item.run for item in found if item.run is not None)]


def plain_runs(group: Group) -> list[PlainRun]:
    """Return the runs of a group as plain values in the unit of the task; arms are variants.

    The first baseline is called "none", even if its settings differ from those of others.
    """
    timed, found = have_comparable_seconds(group.runs), []
    for arm in group.arms:
        name = BASELINE if arm.index == 0 else arm.name
        found += [_plain(run, name, timed) for run in arm.runs]
    return found


def _is_paired(runs: Sequence[Run]) -> bool:
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


def _plain(run: Run, variant: str, timed: bool) -> PlainRun:
    measure, rate, rates = run.measure, None, {}
    for row in run.rows:
        rates[row["updates"]] = rate = row.get("lr", rate)
    tests = {row["updates"]: row for row in run.split("test", run.saved_statistics)}
    rows = {
        "valid": run.split("valid", run.serving),
        "test": list(tests.values()),
        "train_eval": run.split("train_eval", run.serving),
    }

    def point(row: Row) -> Point:
        seconds = row["seconds"] if timed else None
        return Point(row["updates"], measure.convert(row["loss"]), seconds, rates[row["updates"]])

    splits = {name: list(map(point, some)) for name, some in rows.items() if some}
    return PlainRun(variant, run.seed, splits, bool(run.diverged))
