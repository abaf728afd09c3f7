"""The report, a self-contained HTML file, and its tables."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from normrnn.config.jsonio import flat
from normrnn.config.registry import config_class
from normrnn.errors import UserError
from normrnn.files import open_regular
from normrnn.recipes import RECIPES, summary
from normrnn.reporting import study as studies
from normrnn.reporting.groups import Group, data_name, short
from normrnn.reporting.pictures import draw, svg_data_uri, why_no_pictures
from normrnn.reporting.runs import Run
from normrnn.reporting.study import RecordedStudy
from normrnn.runs.records import epoch_averages
from normrnn.verdicts.result import Verdict
from normrnn.version import __version__

MARK = '<!doctype html>\n<html lang="en" data-by="normrnn report">'
"""Start of every report; only such files are overwritten."""
DASH = "–"
_FACTS = ("normrnn", "torch", "numpy", "python", "cpu", "cores", "system")
_STATISTICS = ("running", "recalibrated", "batch")


@dataclass(frozen=True)
class Table:
    """A table whose first column names the row."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def page(
    title: str,
    problems: Sequence[str],
    recorded: Sequence[RecordedStudy],
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
        warnings=[*(one.state for one in recorded if one.state), *problems],
        parts=[*map(_study, recorded), *(_section(*pair) for pair in compared)],
        no_pictures=why_no_pictures(),
        version=__version__,
        date=f"{datetime.now():%d %B %Y, %H:%M}",
    )


def _section(group: Group, verdict: Verdict) -> dict[str, Any]:
    has_values = any(run.splits.get("valid") for run in verdict.runs)
    return {
        "title": group.title or "unknown recipe",
        "lines": verdict.lines(),
        "details": verdict.details() if verdict.variants else "",
        "about": [summary(group.recipe) if group.recipe in RECIPES else "Unknown recipe."],
        "picture": svg_data_uri(partial(draw, group=group)) if has_values else "",
        "caption": "Validation: mean over seeds, lowest to highest seed",
        "table": runs_table(group),
        "settings": _settings([run for arm in group.arms for run in arm.runs]),
    }


def _study(study: RecordedStudy) -> dict[str, Any]:
    trials, plan = study.trials, flat(study.about)
    has_rates = all(studies.is_number(t["settings"].get(studies.LR)) for t in trials)
    picture = partial(studies.draw, study=study)
    rows = [[name, str(value)] for name, value in plan.items() if name != studies.SUMMARY]
    return {
        "title": study.title,
        "lines": studies.lines(trials),
        "details": "",
        "about": [study.budget, study.summary],
        "picture": svg_data_uri(picture) if trials and has_rates else "",
        "caption": "Validation loss against learning rate",
        "table": _trials_table(trials),
        "settings": Table("Plan of the search", ["setting", "value"], rows),
    }


def runs_table(group: Group) -> Table:
    """Return a row per run: epochs, best training and validation values, test value, speed."""
    shown = group.measure
    kinds = [k for k in _STATISTICS if any(run.split("valid", k) for run in group.runs)]
    several = any(run.normalisation.keeps_statistics for run in group.runs)
    tested = any(run.split("test") for run in group.runs)
    key, name = shown.error_rate or ("", "")
    errors = any(key in row for run in group.runs for row in run.split("valid"))
    head = ["run", "epochs", "train"]
    head += [f"{shown.held_out}, {kind}" if several else shown.held_out for kind in kinds]
    head += [name] * errors + ["test"] * tested + [f"{shown.unit}/s", "seconds"]
    rows = []
    for arm in group.arms:
        for run in arm.runs:
            row = [f"{arm.name}, seed {run.seed}", run.progress + ", running" * run.training]
            row.append(shown.text(_best_train(run)))
            row += [shown.text((run.best(kind) or {}).get("loss")) for kind in kinds]
            row += [_number((run.best(None, key) or {}).get(key), 3)] * errors
            tests = run.split("test", run.saved_statistics) or run.split("test")
            row += [shown.text(tests[-1]["loss"] if tests else None)] * tested
            count, seconds = sum(r["count"] for r in run.split("train")), run.seconds
            rate = count / seconds if count and seconds > 0 else None
            rows.append([*row, _number(rate, 0), f"{seconds:,.0f}"])
    note = "Best epoch of each column. Train: running average in training mode."
    return Table(f"Every run: {shown.long}", head, rows, note)


def _best_train(run: Run) -> float | None:
    """The best training loss; None where the statistics include the inputs to predict."""
    if run.normalisation.looks_ahead and config_class(run.config).predicts_inputs:
        return None
    done = (row for row in epoch_averages(run.rows) if row["epoch"] <= run.epochs_done)
    return min((row["loss"] for row in done), default=None)


def _number(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:,.{digits}f}"


def _trials_table(trials: Sequence[studies.Trial]) -> Table:
    """Return every trial, the lowest loss first."""
    names, arms = studies.settings_of(trials), studies.arms_of(trials)

    def loss(trial: studies.Trial, arm: str) -> str:
        if arm not in trial["arms"]:
            return DASH
        is_trained = studies.trained(trial, arm)
        return _number(trial["arms"][arm]["loss"], 4) if is_trained else "diverged"

    rows = [
        [
            f"{t['trial']}{', pruned' * (t['state'] == 'pruned')}",
            *(studies.value_text(t["settings"].get(name, DASH)) for name in names),
            *(loss(t, arm) for arm in arms),
        ]
        for t in sorted(trials, key=lambda t: min(studies.losses(t), default=math.inf))
    ]
    head = ["trial", *short(names), *(f"loss, {arm}" for arm in arms)]
    return Table("Every trial, the lowest loss first", head, rows)


def _settings(runs: Sequence[Run]) -> Table:
    names = dict.fromkeys(name for run in runs for name in run.settings if name != "data")
    rows = [[name, _values(run.settings.get(name) for run in runs)] for name in names]
    rows.append(["data", _values(map(data_name, runs))])
    machines = [machine for run in runs for machine in run.environments]
    rows += [[fact, _values(one.get(fact) for one in machines)] for fact in _FACTS if machines]
    title = "Settings, versions and machine; several values where runs differ"
    return Table(title, ["setting", "value"], rows)


def _values(values: Iterable[object]) -> str:
    """Return the different values, in their order."""
    shown = (DASH if value is None or value == "" else str(value) for value in values)
    return ", ".join(dict.fromkeys(shown))


def refuse_other(path: Path) -> None:
    """Raise UserError if the file exists and is not a report."""
    if path.is_dir():
        raise UserError(f"{path} is a directory: name the file to write, as in {path}/report.html")
    if path.exists():
        with open_regular(path) as file:
            if file.read(len(MARK)) not in (MARK.encode(), b""):
                raise UserError(f"{path} exists and is not a report: not overwriting it")
