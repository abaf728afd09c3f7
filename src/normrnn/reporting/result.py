"""Runs, their groups and the verdicts on them: what `compare` returns and what a report shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normrnn.errors import UserError
from normrnn.files import write_whole
from normrnn.reporting.answer import group_verdicts
from normrnn.reporting.groups import Group, groups
from normrnn.reporting.runs import Run, RunOrProblem
from normrnn.verdicts.result import Verdict
from normrnn.verdicts.verdict import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from normrnn.reporting.study import RecordedStudy


@dataclass(frozen=True, repr=False)
class Result:
    """Runs and verdicts, one per experiment. `print` it for the answer."""

    found: Sequence[RunOrProblem]
    """The directories that were read."""
    title: str = "normrnn report"
    studies: "Sequence[RecordedStudy]" = ()
    """Searches, or the study that chose a tuned setting."""
    target: float | None = None
    """The validation value to reach that was asked for."""
    folder: Any = None
    """A temporary directory that holds the runs, removed with the result."""

    @cached_property
    def runs(self) -> list[Run]:
        """All runs that could be read."""
        return [one.run for one in self.found if one.run is not None]

    @cached_property
    def groups(self) -> list[Group]:
        """Comparable runs."""
        return groups(self.runs)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """A verdict per group."""
        return group_verdicts(self.groups, settings=Settings(target=self.target))

    @property
    def verdict(self) -> Verdict:
        """The verdict, or the first of several."""
        return self.verdicts[0]

    def plot(self) -> "Figure":
        """Draw validation against updates; matplotlib is needed."""
        from normrnn.reporting.pictures import figure

        return figure(self.runs)

    def page(self) -> str:
        """Return the HTML report; Jinja2 is needed."""
        from normrnn.reporting.page import page

        compared = list(zip(self.groups, self.verdicts, strict=True))
        return page(self.title, self.found, self.studies, compared)

    def save(self, path: str | Path) -> None:
        """Write the HTML report; refuse to overwrite anything but a report."""
        from normrnn.reporting.page import refuse_other

        path = Path(path)
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
