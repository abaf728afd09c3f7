"""The report: a self-contained HTML file."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from normrnn.errors import UserError
from normrnn.files import open_regular
from normrnn.recipes import RECIPES, summary
from normrnn.reporting import trials
from normrnn.reporting.groups import Group, data_name
from normrnn.reporting.pictures import address, draw, why_no_pictures
from normrnn.reporting.runs import Run, RunOrProblem
from normrnn.reporting.study import RecordedStudy
from normrnn.reporting.tables import DASH, Table, runs_table
from normrnn.verdicts.result import HEAD, Verdict
from normrnn.version import __version__

MARK = '<!doctype html>\n<html lang="en" data-by="normrnn report">'
"""Start of every report; only such files are overwritten."""
_FACTS = ("normrnn", "torch", "numpy", "python", "cpu", "cores", "system")


def page(
    title: str,
    found: Sequence[RunOrProblem],
    studies: Sequence[RecordedStudy],
    compared: Sequence[tuple[Group, Verdict]],
) -> str:
    """Return the HTML report of studies, and of groups of runs with the verdicts on them."""
    environment = Environment(
        loader=PackageLoader("normrnn.reporting", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=title,
        warnings=[line for one in (*studies, *found) for line in _warnings(one)],
        parts=[*map(_study, studies), *(_section(*pair) for pair in compared)],
        no_pictures=why_no_pictures(),
        version=__version__,
        date=f"{datetime.now():%d %B %Y, %H:%M}",
    )


def _warnings(one: RunOrProblem | RecordedStudy) -> list[str]:
    """List what is damaged or unfinished."""
    name = one.path.name or str(one.path)
    if isinstance(one, RecordedStudy):
        return [f"{one.name} {one.state}"] if one.state else []
    lines = [f"{name} {one.problem}"] if one.problem else []
    if one.run is not None and not one.run.finished:
        run = one.run
        state = "running" if run.training else "diverged" if run.diverged else "not finished"
        lines.append(f"{name} ({run.label}): {state}, {run.updates:,} updates")
    return lines


def _section(group: Group, verdict: Verdict) -> dict[str, Any]:
    runs = [run for arm in group.arms for run in arm.runs]
    has_values = any(run.splits.get("valid") for run in verdict.runs)
    figures = Table("All figures", HEAD, verdict.table(details=True), verdict.method)
    return {
        "title": group.title or "unknown recipe",
        "lines": verdict.lines(),
        "about": [summary(group.recipe) if group.recipe in RECIPES else "Unknown recipe."],
        "picture": address(partial(draw, group=group)) if has_values else "",
        "caption": "Validation: mean over seeds, lowest to highest seed",
        "tables": [figures, runs_table(group)],
        "settings": [_settings(runs)],
    }


def _settings(runs: Sequence[Run]) -> Table:
    names = dict.fromkeys(name for run in runs for name in run.settings if name != "data")
    rows = [[name, _values(run.settings.get(name) for run in runs)] for name in names]
    rows.append(["data", _values(map(data_name, runs))])
    places = [place for run in runs for place in run.environments if isinstance(place, dict)]
    rows += [[fact, _values(place.get(fact) for place in places)] for fact in _FACTS if places]
    title = "Settings, versions and machine; several values where runs differ"
    return Table(title, ["setting", "value"], rows)


def _values(values: Iterable[object]) -> str:
    """Return the different values, in their order."""
    shown = (DASH if value is None or value == "" else str(value) for value in values)
    return ", ".join(dict.fromkeys(shown))


def _study(study: RecordedStudy) -> dict[str, Any]:
    found = study.trials
    tables = [trials.table(found, paper=study.paper), trials.trials_table(found)] if found else []
    return {
        "title": study.title,
        "lines": trials.lines(found),
        "about": [study.budget, study.said],
        "picture": address(partial(trials.draw, trials=found)) if study.drawable else "",
        "caption": "Validation loss against learning rate",
        "tables": [*tables, trials.space_table(study.about.get("space"), found)],
        "settings": [],
    }


def refuse_other(path: Path) -> None:
    """Raise UserError if the file exists and is not a report."""
    if path.is_dir():
        raise UserError(f"{path} is a directory: name the file to write, as in {path}/report.html")
    if path.exists():
        with open_regular(path) as file:
            if file.read(len(MARK)) not in (MARK.encode(), b""):
                raise UserError(f"{path} exists and is not a report: not overwriting it")
