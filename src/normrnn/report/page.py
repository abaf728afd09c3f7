"""The report: one HTML file that loads nothing from elsewhere."""

import re
from collections.abc import Sequence
from datetime import datetime
from html import escape

from normrnn.recipes import RECIPES, summary
from normrnn.report import study_page
from normrnn.report.groups import Group, command, data_name, differing, groups
from normrnn.report.pictures import Picture, pictures, svg, why_no_pictures
from normrnn.report.runs import Run, RunOrProblem
from normrnn.report.study import RecordedStudy
from normrnn.report.tables import (
    DASH,
    Table,
    as_markdown,
    differences_table,
    paper_table,
    runs_table,
    target_table,
)
from normrnn.report.trials import markdown as study_markdown
from normrnn.report.verdict import Verdict, group_verdict
from normrnn.version import __version__

MARK = '<!doctype html>\n<html lang="en" data-by="normrnn report">'
"""How every report begins: such a file may be overwritten."""

THEMES = {
    "light": {
        "page": "#ffffff",
        "box": "#f3f5f8",
        "text": "#1b1f24",
        "quiet": "#525a64",
        "line": "#c9d0d8",
        "grid": "#dde2e8",
        "warn": "#fff3d6",
        "arm0": "#1f5fbf",
        "arm1": "#c62828",
        "arm2": "#a35200",
        "arm3": "#7a3fa0",
        "arm4": "#00695c",
    },
    "dark": {
        "page": "#14171b",
        "box": "#1e2329",
        "text": "#e6e8eb",
        "quiet": "#aab2bc",
        "line": "#3b434d",
        "grid": "#2c333b",
        "warn": "#3a2f12",
        "arm0": "#7fb2ff",
        "arm1": "#ff8a80",
        "arm2": "#ffb561",
        "arm3": "#d2a3f2",
        "arm4": "#64d4c0",
    },
}

_CSS = """
:root { color-scheme: light dark; %(light)s }
@media (prefers-color-scheme: dark) { :root { %(dark)s } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem 1.1rem 4rem; max-width: 76rem; background: var(--page);
  color: var(--text); font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; margin: .6rem 0 .2rem; line-height: 1.25; }
h2 { font-size: 1.3rem; margin: 2.6rem 0 .2rem; padding-top: .9rem; line-height: 1.25;
  border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .5rem 0; max-width: 46rem; }
a { color: var(--arm0); }
.quiet, .note, figcaption, .caption { color: var(--quiet); }
.note { font-size: .875rem; }
.verdict { background: var(--box); border-left: 4px solid var(--arm1); border-radius: 4px;
  padding: .7rem 1rem; margin: 1rem 0; max-width: 50rem; font-size: 1.06rem; }
.verdict p { margin: .3rem 0; max-width: none; }
.warn { background: var(--warn); border-radius: 4px; padding: .55rem 1rem; margin: .8rem 0;
  max-width: 50rem; }
.warn ul { margin: .2rem 0; padding-left: 1.2rem; }
.pictures { display: grid; gap: 1.4rem 1.6rem; margin: .6rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%%, 21rem), 1fr)); }
figure { margin: 0; min-width: 0; max-width: 40rem; }
figure svg { display: block; width: 100%%; height: auto; overflow: visible; }
figcaption { font-size: .875rem; line-height: 1.4; margin-top: .2rem; }
figcaption b { color: var(--text); font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; padding: 0; margin: .6rem 0;
  list-style: none; font-size: .9rem; }
.legend svg { width: 2.4em; height: .8em; vertical-align: middle; margin-right: .45em; }
.scroll { overflow-x: auto; margin: .2rem 0 .3rem; }
.tall .scroll { max-height: 30rem; overflow-y: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
.caption { font-size: .9rem; margin: 1.2rem 0 0; }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; }
th { font-weight: 600; }
tbody th, thead tr:last-child th:first-child { text-align: left; padding-left: 0;
  position: sticky; left: 0; background: var(--page); }
thead tr:last-child th { border-bottom: 1px solid var(--quiet); }
thead th[scope=colgroup] { text-align: center; border-bottom: 1px solid var(--line); }
tbody tr + tr > * { border-top: 1px solid var(--line); }
details { margin: .8rem 0; }
summary { cursor: pointer; font-weight: 600; }
code { font: .86em ui-monospace, monospace; background: var(--box); border-radius: 3px;
  padding: .1em .3em; overflow-wrap: anywhere; }
:focus-visible { outline: 2px solid var(--arm0); outline-offset: 2px; }
@media print { details > * { display: block; } .tall .scroll { max-height: none; } }
"""


def page(
    found: Sequence[RunOrProblem],
    title: str = "normrnn report",
    studies: Sequence[RecordedStudy] = (),
    target: float | None = None,
) -> str:
    """The whole report, of studies, of runs and of directories that are none; with a `target` on
    validation, what each arm needed to reach it."""
    runs = [one.run for one in found if one.run is not None]
    parts = groups(runs)
    themes = {
        name: " ".join(f"--{key}: {value};" for key, value in theme.items())
        for name, theme in THEMES.items()
    }
    count = f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
    several = f"{len(studies)} stud{'y' if len(studies) == 1 else 'ies'}, " if studies else ""
    recipes = ", ".join(dict.fromkeys(part.recipe or "unknown recipe" for part in parts))
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="quiet">{several}{count}{escape(f" of {recipes}" if recipes else "")}</p>',
        _state(found, studies),
        _contents([study_page.title(s) for s in studies], [part.title for part in parts]),
        *(study_page.section(study, f"t{i}") for i, study in enumerate(studies)),
        *(_section(part, f"s{i}", target) for i, part in enumerate(parts)),
        f'<p class="note">Written by normrnn {escape(__version__)},'
        f" {datetime.now():%d %B %Y, %H:%M}.</p>",
    ]
    return "\n".join(
        [
            MARK,
            '<head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            '<link rel="icon" href="data:,">',
            f"<style>{_CSS % themes}</style></head>",
            "<body><main>",
            *(part for part in body if part),
            "</main></body></html>\n",
        ]
    )


def _state(found: Sequence[RunOrProblem], studies: Sequence[RecordedStudy]) -> str:
    """What is not as it should be, in words."""
    lines = [
        f"<code>{escape(study.name)}</code> {escape(said)}."
        for study in studies
        if (said := study_page.state(study))
    ]
    for one in found:
        run = one.run
        name = escape(one.path.name or str(one.path))
        if one.problem:
            also = "" if run is None else "; the rows before that are shown"
            lines.append(f"<code>{name}</code> {escape(one.problem)}{also}.")
        if run is None or run.finished:
            continue
        at = f"{run.updates:,} updates" if run.rows else ""
        if run.diverged:
            state = run.progress
        elif run.training:
            state = f"is still running: {at} so far" if at else "is running, with no rows yet"
        else:
            state = f"has not finished: it stopped after {at}" if at else "has no rows yet"
        lines.append(f"<code>{name}</code> ({escape(run.label)}) {state}.")
    if not studies and not any(one.run for one in found):
        lines.append("There is nothing to show: none of these directories holds a run.")
    if not lines:
        return ""
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f'<div class="warn" role="note"><ul>{items}</ul></div>'


def _contents(studies: Sequence[str], parts: Sequence[str]) -> str:
    if len(studies) + len(parts) < 2:
        return ""
    links = [
        f'<a href="#{kind}{i}">{escape(title)}</a>'
        for kind, titles in (("t", studies), ("s", parts))
        for i, title in enumerate(titles)
    ]
    return f"<nav><p>{' · '.join(links)}</p></nav>"


def _section(group: Group, anchor: str, target: float | None) -> str:
    about = summary(group.recipe) if group.recipe in RECIPES else "A recipe not known here."
    omitted = why_no_pictures()
    shown = [] if omitted else pictures(group)
    curves = [p for p in shown if p.name.startswith("curves")]
    rest = [p for p in shown if not p.name.startswith("curves")]
    verdict = group_verdict(group, target)
    lines = [
        f'<section aria-labelledby="{anchor}">',
        f'<h2 id="{anchor}">{escape(group.title or "unknown recipe")}</h2>',
        f'<p class="quiet">{escape(about)}</p>',
        f'<div class="verdict">{"".join(map(_said, verdict.sentences))}</div>',
        *(table.html() for table in evidence(group, verdict, target)),
        paper_table(group).html(),
    ]
    if curves:
        lines += [
            "<h3>Curves</h3>",
            _legend(group),
            _grid(curves, group, anchor),
            "<h3>Overfitting, gradients, learning rate</h3>" if rest else "",
            _grid(rest, group, anchor),
        ]
    else:
        lines.append(f"<p>{escape(omitted or 'There are no rows to draw yet')}.</p>")
    lines += [
        "<h3>Runs</h3>",
        runs_table(group).html(),
        "<h3>Settings</h3>",
        _settings(group),
        "<h3>Where it ran, and how to repeat it</h3>",
        _machines(group),
        _commands(group),
        "</section>",
    ]
    return "\n".join(line for line in lines if line)


_HEAVY = re.compile(
    r"One seed|No saving( seen)?|[Nn]o (difference seen|saving can be seen)|diverged"
    r"|(at least )?(?<![\d.])[\d.]+% (fewer|more) updates"
    r"|(?<![\d.])[\d.]+% (less|more) time|\b(better|worse)(?=:)"
)


def _said(text: str) -> str:
    """A paragraph of the verdict, with what counts in bold."""
    return f"<p>{_HEAVY.sub(lambda found: f'<b>{found[0]}</b>', escape(text))}</p>"


def _grid(shown: Sequence[Picture], group: Group, anchor: str) -> str:
    if not shown:
        return ""
    figures = [
        f"<figure>{svg(picture, group, f'{anchor}-{picture.name}')}"
        f"<figcaption><b>{escape(picture.title)}.</b> {escape(picture.words)}</figcaption></figure>"
        for picture in shown
    ]
    return f'<div class="pictures">{"".join(figures)}</div>'


def _legend(group: Group) -> str:
    items = []
    for arm in group.arms:
        ahead = all(run.looks_ahead for run in arm.runs)
        for what, dash in (("train", "1.5 3"), (group.measure.held_out, ""))[ahead:]:
            line = f'<line x1="0" y1="4" x2="24" y2="4" stroke-dasharray="{dash}"'
            line += f' stroke="var(--arm{arm.index % 5})" stroke-width="2.4"/>'
            items.append(
                f'<li><svg viewBox="0 0 24 8" aria-hidden="true">{line}</svg>'
                f"{escape(arm.name)}, {what}</li>"
            )
    several = any(len(arm.runs) > 1 for arm in group.arms)
    seeds = '<li class="quiet">thin: one seed; thick: their mean</li>' if several else ""
    return f'<ul class="legend">{"".join(items)}{seeds}</ul>'


def _ordered(group: Group) -> list[Run]:
    return [run for arm in group.arms for run in arm.runs]


def _settings(group: Group) -> str:
    runs = _ordered(group)
    different = differing(runs)
    labels = [run.label for run in runs]
    rows = [[name, *map(_value, values)] for name, values in different.items()]
    table = Table("Settings in which the runs differ", [("", ["setting", *labels])], rows).html()
    same = "<p>The runs differ in normalisation and seed alone.</p>" if len(runs) > 1 else ""
    common = [
        [name, _value(value)]
        for name, value in runs[0].settings.items()
        if name not in (*different, "norm", "seed", "data")
    ]
    common.append(["data", data_name(runs[0])])
    every = Table("Settings common to all runs", [("", ["setting", "value"])], common).html()
    return (
        table if rows else same
    ) + f"<details><summary>All {len(common)} common settings</summary>{every}</details>"


def _value(value: object) -> str:
    return DASH if value is None or value == "" else str(value)


FACTS = {
    "normrnn": "normrnn",
    "torch": "torch",
    "numpy": "numpy",
    "python": "Python",
    "cpu": "processor",
    "cores": "cores",
    "threads": "threads",
    "system": "system",
}


def _machines(group: Group) -> str:
    """Versions and machine of every run."""
    rows = []
    for run in _ordered(group):
        places = run.environments or [{}]
        for place in places:
            facts = [_value(place.get(key)) for key in FACTS] if place else ["not recorded"]
            rows.append([run.label, f"{run.seconds:,.0f}", *facts])
    head = ["run", "seconds", *FACTS.values()]
    rows = [row + [DASH] * (len(head) - len(row)) for row in rows]
    note = (
        "Seconds are those spent in updates, and depend on what else the machine was doing."
        " A run that went on elsewhere has a line per machine, with the seconds of all."
    )
    if all(not run.environments for run in group.runs):
        return f"<p>Versions and machine were not recorded with these runs. {escape(note[:83])}</p>"
    return Table("Versions and machine", [("", head)], rows, note).html()


def _commands(group: Group) -> str:
    items = "".join(f"<li><code>{escape(command(run))}</code></li>" for run in _ordered(group))
    hashes = {str(run.settings.get("data_sha256") or "") for run in group.runs} - {""}
    data = f" Data: sha256 {', '.join(sorted(hashes))}." if hashes else ""
    return (
        f"<p>In the directory that holds the data:</p><ul>{items}</ul>"
        f'<p class="note">{escape(data)}</p>'
    )


def evidence(group: Group, verdict: Verdict, target: float | None = None) -> list[Table]:
    """The numbers behind a verdict."""
    tables = [differences_table(found) for found in verdict.comparisons if found.figures]
    return tables if target is None else [target_table(group, target), *tables]


def markdown(
    found: Sequence[RunOrProblem],
    studies: Sequence[RecordedStudy] = (),
    target: float | None = None,
) -> str:
    """Verdicts and tables as Markdown."""
    parts = []
    for study in studies:
        parts.append(f"## {as_markdown(study_page.title(study))}")
        parts += (
            [study_markdown(study.trials, study.paper, study.said).strip()] if study.trials else []
        )
    for group in groups([one.run for one in found if one.run is not None]):
        parts.append(f"## {as_markdown(group.title)}")
        verdict = group_verdict(group, target)
        parts += map(as_markdown, verdict.sentences)
        tables = [*evidence(group, verdict, target), paper_table(group), runs_table(group)]
        for table in tables:
            parts += [f"**{as_markdown(table.title)}**", table.markdown()]
            parts += [table.note] if table.note else []
    problems = [f"{one.path.name} {one.problem}." for one in found if one.problem]
    problems += [f"{s.name} {said}." for s in studies if (said := study_page.state(s))]
    return "\n\n".join([*parts, *map(as_markdown, problems)]) + "\n"
