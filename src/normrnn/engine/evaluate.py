"""Evaluate a trained run, for `normrnn evaluate`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from normrnn.config.base import Config
from normrnn.config.registry import task_of
from normrnn.engine.task import Models, Task
from normrnn.errors import UserError
from normrnn.files import sealed_json
from normrnn.norms import statistics_shown
from normrnn.runs.environment import named_device
from normrnn.runs.records import EVALUATION, finite_rows
from normrnn.runs.store import RunDirectory


def evaluate(
    run: Path, data: str = "", device: str = "cpu", one_stream: bool = True
) -> dict[str, Any]:
    """Evaluate the best model of `run` on all splits under all statistics; the content of
    evaluation.json.

    `data` is where the data is now, if not where it was in training, or other data. Without
    `one_stream`, the rows that only an evaluation computes are left out.
    """
    directory, place = RunDirectory(run), named_device(device)
    config = directory.config()
    kind: type[Task] = task_of(config)
    model = kind.load(directory, place)
    saved = directory.model_metadata
    task = kind.open(replace(config, data=data or config.data), model)
    task.device = place
    # A model saved with recalibrated statistics does not have the running ones.
    is_recalibrated = saved.get("statistics") == "recalibrated"
    models: Models = {"recalibrated": model} if is_recalibrated else task.population(model)
    rows = [row for split in task.splits for row in task.rows(models, split)]
    if task.has_train_eval:
        rows.append(task.score(model, "train_eval", next(iter(models))))
    rows += task.extra_rows(models) if one_stream else []
    finite = finite_rows(rows)
    if not finite:
        raise UserError(f"the model of {run} gives no finite loss on {task.where}")
    notes = [
        f"{row['split']} with {row['statistics']} statistics left out: its loss is {row['loss']}"
        for row in rows
        if row not in finite
    ]
    same, norm = task.sha256 == config.data_sha256, config.normalisation
    if norm.looks_ahead and config.predicts_inputs:
        notes.append("no batch statistics: they include the later inputs that are predicted")
    if norm.keeps_statistics and "recalibrated" not in models:
        notes.append(f"no recalibrated statistics: {task.where} has no training batch for them")
    elif not same and len(models) > 1:
        notes.append(f"recalibrated statistics are of {task.where}, not of the training data")
    about = {name: getattr(config, name) for name in ("recipe", "norm", "seed")}
    about |= {"model_sha256": saved["sha256"], "data_sha256": task.sha256, "same_data": same}
    return {**about, "rows": finite, "notes": notes}


def keep(run: Path, result: dict[str, Any]) -> None:
    """Write evaluation.json."""
    RunDirectory(run).write(EVALUATION, sealed_json(result))


def show(result: Mapping[str, Any], config: Config, console: Console) -> None:
    """Print an evaluation as a table that fits in 80 columns, and its notes."""
    measure, rows = config.loss_measure, result["rows"]
    others = ("split", "statistics", "value", measure.name)
    names = [*dict.fromkeys(k for row in rows for k in row if k not in others)]
    names += [] if measure.convert is float else [measure.name]
    table = Table(
        *("set", "statistics"),
        *(Column(measure.unit if name == "count" else name, justify="right") for name in names),
        title=f"{result['recipe']}, norm {result['norm']}, seed {result['seed']}",
        box=SIMPLE_HEAD,
        padding=0,
    )
    for row in rows:
        shown = {**row, measure.name: measure.convert(row["loss"])}
        cells = (_cell(shown.get(name)) for name in names)
        table.add_row(row["split"], statistics_shown(result, row), *cells)
    console.print(table)
    for line in result["notes"]:
        console.print(line)


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
