"""Runs as plain rows for verdicts."""

from collections.abc import Sequence

from normrnn.config.measure import Measure
from normrnn.report.groups import Group
from normrnn.report.runs import Row, Run
from normrnn.verdicts.rows import BASELINE, PlainRun, Point


def plain_runs(group: Group) -> list[PlainRun]:
    """The runs of a group, in the unit that its task shows; arms are variants."""
    found = []
    for arm in group.arms:
        normalises = arm.runs[0].normalisation.normalises
        name = arm.name.replace(arm.runs[0].normalisation.label, arm.norm, 1)
        found += [_plain(run, name if normalises else BASELINE, group.measure) for run in arm.runs]
    return found


def is_paired(runs: Sequence[Run]) -> bool:
    """Whether runs of one seed share their initial weights, batches and masks."""
    return all(run.config.get("shared_initialisation") is True for run in runs)


def have_comparable_seconds(runs: Sequence[Run]) -> bool:
    """Whether all ran on the same machine, device and software, and long enough to be timed."""
    places = [(run.environments, run.settings.get("device")) for run in runs]
    same = all(place == places[0] and place[0] for place in places)
    return same and all(run.seconds >= LONG_ENOUGH for run in runs)


LONG_ENOUGH = 30.0
"""Seconds: shorter runs say nothing about speed."""


def _plain(run: Run, variant: str, measure: Measure) -> PlainRun:
    rate, rates = None, {}
    for row in run.rows:
        rate = row.get("lr", rate)
        rates[row["updates"]] = rate

    def points(rows: Sequence[Row]) -> list[Point]:
        return [
            Point(r["updates"], measure.of(r["loss"]), r["seconds"], rates[r["updates"]])
            for r in rows
        ]

    splits = {
        "valid": points(run.split("valid", run.serving)),
        "test": points(run.split("test", saved_statistics(run))[-1:]),
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
