"""`normrnn report RUN...`."""

import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from normrnn.console import PlainConsole
from normrnn.errors import UsageError, UserError, notice

FILE = "report.html"


def command(
    runs: Annotated[Positional[list[Path]], arg(metavar="RUN...")],
    out: Annotated[Path | None, arg(metavar="FILE", aliases=["-o"])] = None,
    markdown: bool = False,
    details: bool = False,
    target: float | None = None,
) -> None:
    """Print the verdict on runs; write it with curves, tables and settings as one HTML file.

    Args:
        runs: Run directories, finished or not, studies of `normrnn search`, or directories
            that hold some.
        out: The report; report.html in the directory given, or in the current one if several
            are given.
        markdown: Print the verdicts and tables as Markdown instead.
        details: Print the secondary figures too.
        target: A validation value to reach (perplexity, nats, FCE), instead of one that
            every run reaches.
    """
    from normrnn.reporting import page, trials
    from normrnn.reporting.answer import group_verdicts
    from normrnn.reporting.groups import groups, without_repeats
    from normrnn.reporting.pictures import why_no_pictures
    from normrnn.reporting.runs import find
    from normrnn.reporting.study import find_studies

    if not runs:
        raise UsageError("report needs at least one run directory")
    path = out or (runs[0] / FILE if len(runs) == 1 else Path(FILE))
    studies, places = find_studies(runs)
    found = without_repeats(find(places))
    if not studies and all(one.run is None for one in found):
        raise UserError("; ".join(f"{one.path} {one.problem}" for one in found) or "no runs there")
    for one in found:
        if one.problem:
            notice(f"{one.path} {one.problem}")
    if markdown:
        print(page.markdown(found, studies, target), end="")
    else:
        console = PlainConsole(soft_wrap=True)
        for study in studies:
            console.print("\n".join([f"{study.title}:", *trials.lines(study.trials)]))
        parts = groups([one.run for one in found if one.run is not None])
        for verdict in group_verdicts(parts, target=target, titled=bool(studies)):
            console.print(verdict.details() if details else str(verdict))
    page.write_report(found, path, studies=studies, target=target)
    omitted = why_no_pictures()
    text_only = f" ({omitted})" if omitted else ""
    print(f"report: {path}{text_only}", file=sys.stderr if markdown else sys.stdout)
