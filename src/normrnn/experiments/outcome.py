"""The result of a comparison: its runs, the verdict on them, and the report in its directory."""

import contextlib
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from normrnn.extras import install_command

if TYPE_CHECKING:
    from normrnn.reporting.result import Result
    from normrnn.reporting.study import RecordedStudy

REPORT = "report.html"


class TemporaryFolder:
    """A directory that is removed when this object is."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="normrnn-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def check_report(out: Path) -> str:
    """Return what the report in `out` will lack, and how to get it; empty if nothing.

    UserError if another file is in its place.
    """
    try:
        from normrnn.reporting.page import refuse_other
        from normrnn.reporting.pictures import why_no_pictures
    except ImportError as error:
        return f"no {REPORT} ({error}): {install_command('report')}"
    refuse_other(out / REPORT)
    return why_no_pictures()


def conclude(
    directories: Sequence[Path],
    what: str,
    out: Path,
    target: float | None = None,
    studies: "Sequence[RecordedStudy]" = (),
) -> "Result":
    """Read the runs, judge them and write OUT/report.html, if Jinja2 is installed."""
    from normrnn.reporting.answer import group_verdicts
    from normrnn.reporting.groups import groups
    from normrnn.reporting.result import Result, Runs
    from normrnn.reporting.runs import find

    found = find(directories)
    runs = Runs(one.run for one in found if one.run is not None)
    title = f"normrnn compare {what}"
    with contextlib.suppress(ImportError):
        from normrnn.reporting.page import write_report

        write_report(found, out / REPORT, title, list(studies), target)
    verdicts = group_verdicts(groups(runs), target=target)
    return Result(runs, verdicts, title, target=target, studies=studies)
