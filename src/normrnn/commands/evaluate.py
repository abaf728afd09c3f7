"""`normrnn evaluate RUN`."""

from pathlib import Path
from typing import Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from normrnn.commands.options import parse
from normrnn.runs.metrics import perplexity


def run(arguments: list[str]) -> int:
    """Losses of a trained run."""

    def options(
        run: Annotated[Positional[Path], arg(metavar="RUN")],
        data: str = "",
        device: str = "cpu",
        threads: int = 0,
        one_stream: bool = True,
    ) -> None:
        """The best model of a run with running, recalibrated and batch statistics.

        Perplexities of a language model, cross entropy and error rate per frame of an acoustic one.

        Writes evaluation.json into the run directory, unless on other data than the run's.

        Args:
            run: Run directory.
            data: Where the data is now, if not where it was in training; or other data.
            device: Where to compute.
            threads: Threads of the tensor library; 0 is its own choice.
            one_stream: Also read the test text as one stream, as Zaremba did: slow for large nets.
        """
        from normrnn.runs.environment import set_threads
        from normrnn.runs.evaluate import evaluate, keep

        set_threads(threads)
        result = evaluate(run, data, device, one_stream)
        (_show_speech if "fer" in result["rows"][0] else _show)(result)
        if result["same_data"]:
            keep(run, result)
        else:
            print(f"{data} is not what {run} was trained on: its evaluation.json is left alone")

    parse(options, "evaluate", arguments)
    return 0


def _show_speech(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['recipe']}, norm {result['norm']}, seed {result['seed']}")
    for name in ("set", "statistics"):
        table.add_column(name)
    for name in ("frames", "FCE", "FER"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        count, loss, fer = f"{row['count']:,}", f"{row['loss']:.4f}", f"{row['fer']:.2%}"
        table.add_row(row["split"], row["statistics"], count, loss, fer)
    Console(highlight=False).print(table)


def _show(result: dict[str, Any]) -> None:
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
            row["statistics"],
            str(row["streams"]),
            f"{row['count']:,}",
            f"{row['loss']:.4f}",
            *(f"{row['bpc']:.4f}" for _ in bits),
            f"{perplexity(row['loss']):,.2f}",
            f"{row['batch_ppl']:,.2f}" if "batch_ppl" in row else "",
        )
    console = Console(highlight=False)
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
