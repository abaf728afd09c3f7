"""The report: a self-contained HTML file, or Markdown."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from normrnn.errors import UserError
from normrnn.files import open_regular, write_whole
from normrnn.recipes import RECIPES, summary
from normrnn.reporting import trials
from normrnn.reporting.answer import group_verdict
from normrnn.reporting.groups import Group, command, data_name, differing, groups
from normrnn.reporting.pictures import Picture, draw, pictures, svg, why_no_pictures
from normrnn.reporting.runs import Run, RunOrProblem
from normrnn.reporting.study import RecordedStudy
from normrnn.reporting.tables import DASH, Table, as_markdown, details_tables, runs_table
from normrnn.version import __version__

MARK = '<!doctype html>\n<html lang="en" data-by="normrnn report">'
"""Start of every report; only such files are overwritten."""
_FACTS = ("normrnn", "torch", "numpy", "python", "cpu", "cores", "threads", "system")


def page(
    found: Sequence[RunOrProblem],
    title: str = "normrnn report",
    studies: Sequence[RecordedStudy] = (),
    target: float | None = None,
) -> str:
    """Return the HTML report of studies and runs; `target` is a validation value to reach."""
    environment = Environment(
        loader=PackageLoader("normrnn.reporting", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    parts = groups([one.run for one in found if one.run is not None])
    return environment.get_template("page.html").render(
        title=title,
        warnings=warnings(found, studies),
        studies=[_study(study, f"t{i}") for i, study in enumerate(studies)],
        sections=[_section(group, f"s{i}", target) for i, group in enumerate(parts)],
        no_pictures=why_no_pictures(),
        version=__version__,
        date=f"{datetime.now():%d %B %Y, %H:%M}",
    )


def warnings(found: Sequence[RunOrProblem], studies: Sequence[RecordedStudy]) -> list[str]:
    """List what is damaged, unfinished or missing."""
    lines = [f"{study.name} {study.state}" for study in studies if study.state]
    for one in found:
        run, name = one.run, one.path.name or str(one.path)
        if one.problem:
            also = "" if run is None else "; the rows before that are shown"
            lines.append(f"{name} {one.problem}{also}")
        if run is not None and not run.finished:
            state = "running" if run.training else "diverged" if run.diverged else "not finished"
            lines.append(f"{name} ({run.label}): {state}, {run.updates:,} updates")
    if not studies and not any(one.run for one in found):
        lines.append("none of these directories holds a run")
    return lines


def _section(group: Group, anchor: str, target: float | None) -> dict[str, Any]:
    verdict = group_verdict(group, target=target)
    runs = [run for arm in group.arms for run in arm.runs]
    drawn = [] if why_no_pictures() else [(p, _svg(group, p, anchor)) for p in pictures(group)]
    return {
        "anchor": anchor,
        "title": group.title or "unknown recipe",
        "about": summary(group.recipe) if group.recipe in RECIPES else "Unknown recipe.",
        "lines": verdict.lines(),
        "pictures": drawn,
        "tables": [*details_tables(verdict), runs_table(group), _differing(runs)],
        "settings": _settings(runs),
        "machines": _machines(runs),
        "commands": [command(run) for run in runs],
        "data": sorted({str(run.settings.get("data_sha256") or "") for run in runs} - {""}),
    }


def _svg(group: Group, picture: Picture, anchor: str) -> Markup:
    prefix = f"{anchor}-{picture.name}"
    return Markup(svg(lambda axes, *look: draw(axes, group, picture, *look), prefix, picture.title))


def _differing(runs: Sequence[Run]) -> Table:
    rows = [[name, *map(_value, values)] for name, values in differing(runs).items()]
    return Table("Settings in which the runs differ", ["setting", *(r.label for r in runs)], rows)


def _settings(runs: Sequence[Run]) -> Table:
    left_out = (*differing(runs), "norm", "seed", "data")
    rows = [[k, _value(v)] for k, v in runs[0].settings.items() if k not in left_out]
    rows.append(["data", data_name(runs[0])])
    return Table("Settings common to all runs", ["setting", "value"], rows)


def _machines(runs: Sequence[Run]) -> Table:
    rows = [
        [run.label, f"{run.seconds:,.0f}", *(_value(place.get(key)) for key in _FACTS)]
        for run in runs
        for place in run.environments
    ]
    note = "Seconds are those spent in updates, and depend on the load of the machine."
    return Table("Versions and machine", ["run", "seconds", *_FACTS], rows, note)


def _value(value: object) -> str:
    return DASH if value is None or value == "" else str(value)


def _study(study: RecordedStudy, anchor: str) -> dict[str, Any]:
    found, picture = study.trials, Markup("")
    if study.drawable and not why_no_pictures():
        title = "Validation loss against learning rate"
        picture = Markup(svg(lambda axes, *look: trials.draw(axes, found, *look), anchor, title))
    tables = [trials.table(found, paper=study.paper), trials.trials_table(found)] if found else []
    return {
        "anchor": anchor,
        "title": study.title,
        "about": [study.budget, study.said],
        "lines": trials.lines(found),
        "picture": picture,
        "tables": [*tables, trials.space_table(study.about.get("space"), found)],
    }


def markdown(
    found: Sequence[RunOrProblem],
    studies: Sequence[RecordedStudy] = (),
    target: float | None = None,
) -> str:
    """Return verdicts and tables as Markdown."""
    parts = []
    for study in studies:
        parts.append(f"## {as_markdown(study.title)}")
        parts += [study.markdown().strip()] if study.trials else []
    for group in groups([one.run for one in found if one.run is not None]):
        verdict = group_verdict(group, target=target)
        parts.append(f"## {as_markdown(group.title)}")
        parts.append("\n".join(["```", *verdict.lines(), "```"]))
        for table in (*details_tables(verdict), runs_table(group)):
            parts += [f"**{as_markdown(table.title)}**", table.markdown()] if table.rows else []
    problems = map(as_markdown, warnings(found, studies))
    return "\n\n".join([*parts, *problems]) + "\n"


def write_report(
    found: Sequence[RunOrProblem],
    path: Path,
    title: str = "normrnn report",
    studies: Sequence[RecordedStudy] = (),
    target: float | None = None,
) -> None:
    """Write the report; refuse to overwrite anything but a report."""
    refuse_other(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    write_whole(path, page(found, title, studies, target).encode(errors="backslashreplace"))


def refuse_other(path: Path) -> None:
    """Raise UserError if the file exists and is not a report."""
    if path.is_dir():
        raise UserError(f"{path} is a directory: name the file to write, as in {path}/report.html")
    if path.exists():
        with open_regular(path) as file:
            if file.read(len(MARK)) not in (MARK.encode(), b""):
                raise UserError(f"{path} exists and is not a report: not overwriting it")
