"""Tables for Markdown and HTML; a row per run."""

from collections.abc import Sequence
from dataclasses import dataclass

from normrnn.reporting.groups import Group
from normrnn.reporting.runs import Run
from normrnn.runs.records import epoch_averages

DASH = "–"
COLUMNS = 80
_STATISTICS = ("running", "recalibrated", "batch")


@dataclass(frozen=True)
class Table:
    """A table whose first column names the row."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """Return Markdown without title and note."""
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        return "\n".join(f"| {' | '.join(map(as_markdown, row))} |" for row in lines)


def as_markdown(text: str) -> str:
    """Escape what Markdown would interpret."""
    text = " ".join(text.split())
    return "".join(f"\\{c}" if c in "\\`*_|<>[]" else c for c in text)


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
            row += [shown.text(_lowest(run, "loss", kind)) for kind in kinds]
            row += [_number(_lowest(run, key), 3)] * errors
            row += [shown.text(_test_loss(run))] * tested
            rows.append([*row, _number(run.rate, 0), f"{run.seconds:,.0f}"])
    note = "Best epoch of each column. Train: running average in training mode."
    return Table(f"Every run: {shown.long}", head, rows, note)


def _best_train(run: Run) -> float | None:
    if run.looks_ahead:
        return None
    done = (row for row in epoch_averages(run.rows) if row["epoch"] <= run.epochs_done)
    return min((row["loss"] for row in done), default=None)


def _lowest(run: Run, key: str, kind: str | None = None) -> float | None:
    row = run.best(kind, key)
    return None if row is None else row[key]


def _test_loss(run: Run) -> float | None:
    """The test loss with the statistics that the model was saved with."""
    rows = run.split("test", run.saved_statistics) or run.split("test")
    return rows[-1]["loss"] if rows else None


def _number(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:,.{digits}f}"
