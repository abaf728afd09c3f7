"""`normrnn report RUN...`."""

import math
import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from normrnn.commands.options import parse
from normrnn.errors import UsageError, UserError, notice


def run(arguments: list[str]) -> int:
    """Write a report of runs and studies."""

    def options(
        runs: Annotated[Positional[list[Path]], arg(metavar="RUN...")],
        out: Annotated[Path, arg(metavar="FILE", aliases=["-o"])] = Path("report.html"),
        png: Annotated[Path | None, arg(metavar="DIR")] = None,
        markdown: bool = False,
        target: float | None = None,
    ) -> None:
        """Verdict, curves, tables and settings of runs, in one HTML file.

        Args:
            runs: Run directories, finished or not, studies of `normrnn search`, or directories
                that hold some.
            out: The report.
            png: Also write every picture there.
            markdown: Also print the verdicts and tables as Markdown.
            target: A figure to reach on validation (perplexity, nats, FCE): what each arm needed.
        """
        _report(runs, out, png, markdown, target)

    parse(options, "report", arguments)
    return 0


def _report(
    paths: list[Path], out: Path, png: Path | None, markdown: bool, target: float | None
) -> None:
    from normrnn.report import page
    from normrnn.report.groups import without_repeats
    from normrnn.report.runs import find
    from normrnn.report.study import find_studies
    from normrnn.report.write import write_pictures, write_report

    if target is not None and not 0 < target < math.inf:
        raise UsageError(f"--target must be a number above 0, not {target}")
    if not paths:
        raise UsageError("report needs at least one run directory")
    studies, places = find_studies(paths)
    runs = without_repeats(find(places))
    if not studies and all(one.run is None for one in runs):
        raise UserError("; ".join(f"{one.path} {one.problem}" for one in runs) or "no runs there")
    for one in runs:
        if one.problem:
            notice(f"{one.path} {one.problem}")
    if markdown:  # before what needs matplotlib
        print(page.markdown(runs, studies, target), end="")
    write_report(runs, out, studies=studies, target=target)
    if png is not None:
        for path in write_pictures(runs, png, studies):
            print(f"picture: {path}", file=sys.stderr)
    print(f"report: {out}", file=sys.stderr if markdown else sys.stdout)
