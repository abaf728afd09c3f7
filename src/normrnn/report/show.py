"""The comparison as a table for the terminal and as a picture in the paper's dress."""

import math
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from normrnn.errors import UserError
from normrnn.report.compare import best, epoch_averages
from normrnn.report.runs import Run

COLOURS = {"none": "tab:blue", "frame": "tab:red", "sequence": "tab:orange", "hidden": "tab:purple"}


def table(runs: Sequence[Run]) -> Table:
    """Perplexities of each run: best epoch in training, best validation under all statistics."""
    kinds = ("running", "recalibrated", "batch")
    shown = [k for k in kinds if any(run.split("valid", k) for run in runs)]
    result = Table(
        title="perplexity",
        caption="test: recalibrated statistics where there are any",
        caption_justify="left",
    )
    for name in ("run", "epochs", "train", *(f"valid {k}" for k in shown), "test", "seconds"):
        result.add_column(name, justify="left" if name == "run" else "right", no_wrap=name == "run")
    for run in runs:
        averages = epoch_averages(run)
        rows = [best(run, "valid", k) for k in shown]
        tests = run.split("test", "recalibrated") or run.split("test", "running")
        last = run.rows[-1] if run.rows else {"epoch": 0, "seconds": 0}
        result.add_row(
            run.label,
            f"{last['epoch']}/{run.config['epochs']}",
            _ppl(min((row["loss"] for row in averages), default=None)),
            *(_ppl(row["loss"] if row else None) for row in rows),
            _ppl(tests[0]["loss"] if tests else None),
            f"{last['seconds']:,.0f}",
        )
    return result


def _ppl(loss: float | None) -> str:
    return "-" if loss is None else f"{math.exp(loss):,.1f}"


def curves(runs: Sequence[Run], path: Path) -> None:
    """Perplexity against updates and seconds: train dotted, validation solid, as in Figure 2."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'normrnn[report]'") from None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, key in zip(figure.subplots(1, 2, sharey=True), ("updates", "seconds"), strict=True):
        named: set[str] = set()
        for run in runs:
            name = "" if run.norm in named else run.label.split(",")[0]
            named.add(run.norm)
            colour = COLOURS.get(run.norm)
            kind = "recalibrated" if run.split("valid", "recalibrated") else "running"
            for rows, line, what in (
                (epoch_averages(run), ":", "train"),
                (run.split("valid", kind), "-", "valid"),
            ):
                x, y = [row[key] for row in rows], [math.exp(row["loss"]) for row in rows]
                axes.plot(x, y, line, color=colour, label=name and f"{name}, {what}")
        axes.set_yscale("log")
        axes.set_xlabel(key)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("perplexity")
    figure.axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
