"""An evaluation of an acoustic model, for a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from normrnn.norms import statistics_shown


def show(result: Mapping[str, Any], console: Console) -> None:
    """FCE and FER under all statistics, and the notes."""
    table = Table(title=f"{result['recipe']}, norm {result['norm']}, seed {result['seed']}")
    for name in ("set", "statistics"):
        table.add_column(name)
    for name in ("frames", "FCE", "FER"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        count, loss, fer = f"{row['count']:,}", f"{row['loss']:.4f}", f"{row['fer']:.2%}"
        table.add_row(row["split"], statistics_shown(result, row), count, loss, fer)
    console.print(table)
    for note in result["notes"]:
        console.print(note)
