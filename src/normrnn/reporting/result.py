"""Verdicts on runs: `normrnn.verdict`, and the result of `compare` and of a report."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normrnn.errors import UsageError, UserError
from normrnn.files import expanded, write_whole
from normrnn.reporting.groups import Group, groups
from normrnn.reporting.pictures import why_no_pictures
from normrnn.reporting.runs import Row, Run, load_all
from normrnn.verdicts.result import Verdict, verdict_of
from normrnn.verdicts.rows import BASELINE, PlainRun, Point, read_rows
from normrnn.verdicts.verdict import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from normrnn.reporting.study import RecordedStudy

REPORT = "report.html"
LONG_ENOUGH = 30.0  # seconds that a run must take for its speed to be compared


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
    """
    found = verdicts(rows, Settings(baseline, paired, higher_is_better, target, margin))
    if len(found) > 1:
        raise UsageError("runs of different experiments: " + "; ".join(one.title for one in found))
    return found[0]


def verdicts(rows: Any, settings: Settings) -> list[Verdict]:
    """Compare the variants of several experiments: one verdict each."""
    several = rows if isinstance(rows, list | tuple) else [rows]
    are_runs = several and all(isinstance(item, str | Path | Run) for item in several)
    if not are_runs or (isinstance(rows, str | Path) and Path(rows).is_file()):
        return [verdict_of(read_rows(rows), settings)]
    result = Result(load_all(several), settings=settings)
    if settings.higher_is_better or (settings.paired and not _are_paired(result.runs)):
        raise UsageError(
            "paired and higher_is_better are for rows: run directories say themselves what they are"
        )
    return result.verdicts


@dataclass(frozen=True, repr=False)
class Result:
    """Runs and verdicts, one per experiment. `print` it for the answer."""

    runs: Sequence[Run]
    problems: Sequence[str] = ()  # what could not be read
    title: str = "normrnn report"
    studies: "Sequence[RecordedStudy]" = ()  # searches, or the study that chose a tuned setting
    settings: Settings = field(default_factory=Settings)

    @cached_property
    def groups(self) -> list[Group]:
        """Comparable runs."""
        return groups(self.runs)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """A verdict per group, with titles if there are several."""
        several = len(self.groups) > 1
        return [group_verdict(g, self.settings, g.title if several else "") for g in self.groups]

    @property
    def verdict(self) -> Verdict:
        """The verdict, or the first of several."""
        return self.verdicts[0]

    def plot(self) -> "Figure":
        """Draw validation against updates; matplotlib is needed."""
        from normrnn.reporting.pictures import figure

        return figure(self.runs)

    def page(self) -> str:
        """Return the HTML report."""
        from normrnn.reporting.page import page

        compared = list(zip(self.groups, self.verdicts, strict=True))
        return page(self.title, self.problems, self.studies, compared)

    def save(self, path: str | Path) -> None:
        """Write the HTML report; refuse to overwrite anything but a report."""
        from normrnn.reporting.page import refuse_other

        path = expanded(path)
        refuse_other(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
        write_whole(path, self.page().encode(errors="backslashreplace"))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, those of `normrnn.verdict`."""
        values = [verdict.to_dict() for verdict in self.verdicts]
        return values[0] if len(values) == 1 else {"experiments": values}

    def __str__(self) -> str:
        return "\n".join(map(str, self.verdicts))

    def __repr__(self) -> str:
        return f"<Result of {len(self.runs)} runs: {', '.join(map(repr, self.verdicts))}>"

    def _repr_html_(self) -> str:
        return "".join(verdict._repr_html_() for verdict in self.verdicts)


def report_line(path: Path) -> str:
    """Return where the report is, and why it has no pictures."""
    omitted = why_no_pictures()
    return f"report: {path}{f' ({omitted})' if omitted else ''}"


def group_verdict(group: Group, settings: Settings | None = None, title: str = "") -> Verdict:
    """Compare the variants of a group of comparable runs."""
    measure = group.measure
    settings = replace(
        settings or Settings(),
        paired=_are_paired(group.runs),
        higher_is_better=measure.higher_is_better,
    )
    found = verdict_of(plain_runs(group), settings, measure.name, title)
    unfinished = [run.label for run in group.runs if not run.finished and not run.diverged]
    notes = [f"not finished: {'; '.join(unfinished)}"] if unfinished else []
    if len(epochs := {run.config.get("epochs") for run in group.runs}) > 1:
        notes.append(f"trained for different numbers of epochs: {', '.join(map(str, epochs))}")
    return replace(found, notes=[*found.notes, *notes])


def plain_runs(group: Group) -> list[PlainRun]:
    """Return the runs of a group as plain values in the unit of the task; arms are variants.

    The first baseline is called "none", even if its settings differ from those of others.
    """
    timed = have_comparable_seconds(group.runs)
    tested = all(run.diverged or run.split("test") for run in group.runs)
    return [
        _plain(run, BASELINE if arm.index == 0 else arm.name, timed, tested)
        for arm in group.arms
        for run in arm.runs
    ]


def _are_paired(runs: Sequence[Run]) -> bool:
    """Whether runs of one seed share their initial weights, batches and masks."""
    return all(run.config.get("shared_initialisation") is True for run in runs)


def have_comparable_seconds(runs: Sequence[Run]) -> bool:
    """Whether all ran on the same machine, device and software, long enough to be timed, and at a
    steady rate: seconds per update of one norm within a quarter of each other."""
    machines = [(run.environments, run.settings.get("device")) for run in runs]
    same = all(machine == machines[0] and machine[0] for machine in machines)
    if not same or any(run.seconds < LONG_ENOUGH or not run.updates for run in runs):
        return False
    rates: dict[str, list[float]] = {}
    for run in runs:
        rates.setdefault(run.norm, []).append(run.seconds / run.updates)
    return all(max(some) <= 1.25 * min(some) for some in rates.values())


def _plain(run: Run, variant: str, timed: bool, tested: bool) -> PlainRun:
    measure, rate, rates = run.measure, None, {}
    for row in run.rows:
        rates[row["updates"]] = rate = row.get("lr", rate)

    def point(row: Row) -> Point:
        seconds = row["seconds"] if timed else None
        return Point(row["updates"], measure.convert(row["loss"]), seconds, rates[row["updates"]])

    tests = {row["updates"]: row for row in run.split("test", run.saved_statistics)}
    rows = {"valid": run.split("valid", run.selected_by), "test": tests.values()}
    rows["train_eval"] = run.split("train_eval", run.selected_by)
    splits = {name: list(map(point, some)) for name, some in rows.items() if some}
    selected = (next(reversed(tests.values()), None) if tested else run.best()) or {}
    key, _ = measure.error_rate or ("", "")
    complete = run.finished or bool(run.diverged)
    return PlainRun(variant, run.seed, splits, bool(run.diverged), selected.get(key), complete)
