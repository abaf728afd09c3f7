"""What `normrnn.compare` returns: the runs and the verdict on them, short to print."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normrnn.reporting.groups import groups
from normrnn.reporting.runs import Run, RunOrProblem
from normrnn.reporting.tables import runs_table
from normrnn.verdicts.result import Verdict, html_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Runs(list[Run]):
    """A list of runs with a short repr."""

    def __repr__(self) -> str:
        recipes = ", ".join(dict.fromkeys(run.recipe for run in self))
        return f"<{len(self)} run{'s' * (len(self) != 1)} of {recipes or 'no recipe'}>"

    def _repr_html_(self) -> str:
        tables = [runs_table(group) for group in groups(self)]
        return "".join(html_table(table.head, table.rows) for table in tables)


@dataclass(frozen=True, repr=False)
class Result:
    """Runs and verdicts, one per experiment. `print` it for the answer."""

    runs: Runs
    verdicts: Sequence[Verdict]
    title: str = "normrnn report"
    folder: Any = None
    """A temporary directory that holds the runs, removed with the result."""
    target: float | None = None
    """The validation value to reach that was asked for."""
    studies: Sequence[Any] = ()
    """The study that chose a setting, if one was tuned."""

    @property
    def verdict(self) -> Verdict:
        """The verdict, or the first of several."""
        return self.verdicts[0]

    def plot(self) -> "Figure":
        """Draw validation against updates; matplotlib is needed."""
        from normrnn.reporting.pictures import figure

        return figure(self.runs)

    def save(self, path: str | Path) -> None:
        """Write the HTML report."""
        from normrnn.reporting.page import write_report

        runs = [RunOrProblem(run.path, run) for run in self.runs]
        write_report(runs, Path(path), self.title, self.studies, self.target)

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
