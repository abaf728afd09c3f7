"""`normrnn report RUN...`."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from normrnn.commands.options import parse
from normrnn.console import PlainConsole
from normrnn.errors import UsageError, UserError, notice

if TYPE_CHECKING:
    from normrnn.report.runs import RunOrProblem
    from normrnn.report.study import RecordedStudy

FILE = "report.html"


def run(arguments: list[str]) -> int:
    """Print what runs and studies say, and write a report of them."""

    def options(
        runs: Annotated[Positional[list[Path]], arg(metavar="RUN...")],
        out: Annotated[Path | None, arg(metavar="FILE", aliases=["-o"])] = None,
        png: Annotated[Path | None, arg(metavar="DIR")] = None,
        markdown: bool = False,
        target: float | None = None,
    ) -> None:
        """Print the verdict on runs; write it with curves, tables and settings as one HTML file.

        Args:
            runs: Run directories, finished or not, studies of `normrnn search`, or directories
                that hold some.
            out: The report; report.html in the directory given, or in the current one if several
                are given.
            png: Also write every picture there.
            markdown: Print the verdicts and tables as Markdown instead.
            target: A figure to reach on validation (perplexity, nats, FCE): what each arm needed.
        """
        if not runs:
            raise UsageError("report needs at least one run directory")
        _report(
            runs, out or (runs[0] / FILE if len(runs) == 1 else Path(FILE)), png, markdown, target
        )

    parse(options, "report", arguments)
    return 0


def _report(
    paths: list[Path], out: Path, png: Path | None, markdown: bool, target: float | None
) -> None:
    from normrnn.report import page
    from normrnn.report.groups import without_repeats
    from normrnn.report.pictures import drawing, why_no_pictures
    from normrnn.report.runs import find
    from normrnn.report.study import find_studies
    from normrnn.report.write import write_pictures, write_report

    if target is not None and not 0 < target < math.inf:
        raise UsageError(f"--target must be a number above 0, not {target}")
    if png is not None:
        drawing()
    studies, places = find_studies(paths)
    runs = without_repeats(find(places))
    if not studies and all(one.run is None for one in runs):
        raise UserError("; ".join(f"{one.path} {one.problem}" for one in runs) or "no runs there")
    for one in runs:
        if one.problem:
            notice(f"{one.path} {one.problem}")
    if markdown:
        print(page.markdown(runs, studies, target), end="")
    else:
        _print_answer(runs, studies, target)
    write_report(runs, out, studies=studies, target=target)
    if png is not None:
        for path in write_pictures(runs, png, studies):
            print(f"picture: {path}", file=sys.stderr)
    omitted = why_no_pictures()
    text_only = f" ({omitted})" if omitted else ""
    print(f"report: {out}{text_only}", file=sys.stderr if markdown else sys.stdout)


def _print_answer(
    found: "Sequence[RunOrProblem]", studies: "Sequence[RecordedStudy]", target: float | None
) -> None:
    from normrnn.report.groups import groups
    from normrnn.report.study_page import title
    from normrnn.report.trials import sentences
    from normrnn.report.verdict import group_verdict

    parts = groups([one.run for one in found if one.run is not None])
    answers = [(title(s), [f"{text}." for text in sentences(s.trials)]) for s in studies]
    answers += [(group.title, group_verdict(group, target).sentences) for group in parts]
    console = PlainConsole()
    for name, texts in answers:
        for text in texts:
            console.print(f"{name}: {text}" if len(answers) > 1 else text)
