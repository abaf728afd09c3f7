"""An evaluation of a language model, for a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from normrnn.config.measure import perplexity
from normrnn.norms import statistics_shown


def show(result: Mapping[str, Any], console: Console) -> None:
    """Perplexities under all statistics, the running average in training, and the notes."""
    title = f"{result['recipe']}, norm {result['norm']}, seed {result['seed']}"
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)  # fits into 80 columns
    for name in ("text", "statistics"):
        table.add_column(name)
    bits = ["bpc"] if "bpc" in result["rows"][0] else []
    for name in ("streams", "tokens", "loss", *bits, "perplexity", "mean of batches"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        table.add_row(
            row["split"],
            statistics_shown(result, row),
            str(row["streams"]),
            f"{row['count']:,}",
            f"{row['loss']:.4f}",
            *(f"{row['bpc']:.4f}" for _ in bits),
            f"{perplexity(row['loss']):,.2f}",
            f"{row['batch_ppl']:,.2f}" if "batch_ppl" in row else "",
        )
    console.print(table)
    if result["train_epochs"]:
        best = min(result["train_epochs"], key=lambda row: row["loss"])
        console.print(
            f"train, running average of epoch {best['epoch']}: perplexity"
            f" {perplexity(best['loss']):,.2f}, mean of the mini-batches' {best['batch_ppl']:,.2f}"
        )
    for row in result["authors_protocol"]:
        console.print(
            f"authors' protocol, {row['split']}: {row['batch_ppl']:,.2f} ({row['statistics']}"
            " statistics, mean of the mini-batches' perplexities)"
        )
    for note in result["notes"]:
        console.print(note)
