"""`normrnn verdict PATH...` and `normrnn report RUN...`."""

import json
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from normrnn.errors import UsageError, UserError, notice


def verdict(
    paths: Annotated[Positional[list[Path]], arg(metavar="PATH...")],
    baseline: str | None = None,
    paired: bool = False,
    higher_is_better: bool = False,
    target: float | None = None,
    margin: float = 0.01,
    details: bool = False,
    json_: Annotated[bool, arg(name="json")] = False,
) -> None:
    """Compare every variant with the baseline, with intervals over the seeds.

    Args:
        paths: Run directories, directories that hold some, or one CSV file with the columns
            variant, seed, step, split, value and optionally seconds and lr.
        baseline: Name of the variant to compare with; by default none, else the first.
        paired: Runs of one seed share initial weights and the order of data (CSV only; run
            directories say so themselves).
        higher_is_better: Larger values are better (CSV only).
        target: A validation value to reach, instead of one that every run reaches.
        margin: Differences below this share of the baseline's value count as equivalent.
        details: Print the secondary figures too.
        json_: Print everything as JSON.
    """
    from normrnn.reporting.result import verdicts
    from normrnn.verdicts.verdict import Settings

    if not paths:
        raise UsageError("verdict needs run directories or a CSV file")
    settings = Settings(baseline, paired, higher_is_better, target, margin)
    found = verdicts(paths if len(paths) > 1 else paths[0], settings)
    if json_:
        values = [one.to_dict() for one in found]
        print(json.dumps(values[0] if len(values) == 1 else values, indent=2))
    else:
        print("\n\n".join(one.details() if details else str(one) for one in found))


def report(
    runs: Annotated[Positional[list[Path]], arg(metavar="RUN...")],
    out: Annotated[Path | None, arg(metavar="FILE", aliases=["-o"])] = None,
    details: bool = False,
    target: float | None = None,
) -> None:
    """Print the verdict on runs; write it with curves, tables and settings as one HTML file.

    Args:
        runs: Run directories, finished or not, studies of `normrnn search`, or directories
            that hold some.
        out: The report; report.html in the directory given, or in the current one if several
            are given.
        details: Print the secondary figures too.
        target: A validation value to reach, instead of one that every run reaches.
    """
    from normrnn.reporting.result import REPORT, Result, report_line
    from normrnn.reporting.runs import find
    from normrnn.reporting.study import find_studies, lines
    from normrnn.verdicts.verdict import Settings

    if not runs:
        raise UsageError("report needs at least one run directory")
    path = out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    studies, places = find_studies(runs)
    result = Result(*find(places), studies=studies, settings=Settings(target=target))
    if not studies and not result.runs:
        raise UserError("; ".join(result.problems))
    for problem in result.problems:
        notice(problem)
    for study in studies:
        print("\n".join([f"{study.title}:", *lines(study.trials)]))
    for verdict in result.verdicts:
        print(verdict.details() if details else verdict)
    result.save(path)
    print(report_line(path))
