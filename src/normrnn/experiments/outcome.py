"""The result of a comparison: its runs, the verdict on them, and the report in its directory."""

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normrnn.reporting.result import Result
    from normrnn.reporting.study import RecordedStudy

REPORT = "report.html"


class TemporaryFolder:
    """A directory that is removed when this object is."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="normrnn-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def conclude(
    directories: Sequence[Path],
    what: str,
    out: Path,
    target: float | None = None,
    studies: "Sequence[RecordedStudy]" = (),
) -> "Result":
    """Read the runs, judge them and write OUT/report.html."""
    from normrnn.reporting.answer import group_verdicts
    from normrnn.reporting.groups import groups
    from normrnn.reporting.page import write_report
    from normrnn.reporting.result import Result, Runs
    from normrnn.reporting.runs import find

    found = find(directories)
    runs = Runs(one.run for one in found if one.run is not None)
    title = f"normrnn compare {what}"
    write_report(found, out / REPORT, title, list(studies), target)
    return Result(runs, group_verdicts(groups(runs), target=target), title)
