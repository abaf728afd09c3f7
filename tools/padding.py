"""The table of a study of padding from its records, results/studies/NAME/statistics.json.

The records compare networks whose statistics counted padding (`--model.count-padding`, which the
package had up to commit 13b058e) with networks whose statistics did not.
"""

from collections.abc import Sequence
from statistics import mean
from typing import Any

from normrnn.reporting.page import Table

Record = dict[str, Any]
FILE = "statistics.json"
STATISTICS = ("running", "recalibrated", "batch")


def _kind(one: Record) -> tuple[int, ...]:
    return tuple(one[name] for name in ("pieces", "batch", "pool", "counted"))


def table(records: Sequence[Record]) -> Table:
    """A row per kind of run, the mean over its seeds."""
    kinds: dict[tuple[int, ...], list[Record]] = {}
    for one in records:
        kinds.setdefault(_kind(one), []).append(one)
    several = [kinds[kind] for kind in sorted(kinds)]
    rows = [[_name(some), str(len(some)), *_figures(some)] for some in several]
    columns = ["statistics", "seeds", "padding", *(f"dev FCE, {kind}" for kind in STATISTICS)]
    columns += [f"{of}, {what}" for of in ("batches", "utterance") for what in ("mean", "spread")]
    note = (
        "How far kept statistics are from those of training batches, counted as in training, and"
        " of single development utterances: means in standard deviations, spreads as the logarithm"
        " of the ratio; averaged over layers, features and batches."
    )
    return Table("What padding does to the statistics", columns, rows, note)


def _batches(one: Record) -> str:
    return f"pieces of {one['pieces']}, batch {one['batch']}, pool {one['pool']}"


def _name(some: Sequence[Record]) -> str:
    counts = "with padding" if some[0]["counted"] else "unpadded frames"
    return f"{counts}, {_batches(some[0])}"


def _figures(some: Sequence[Record]) -> list[str]:
    shown = [f"{mean(one['padding'] for one in some):.0%}"]
    for kind in STATISTICS:
        shown.append(f"{mean(one['valid'][kind] for one in some):.3f}")
    for where in ("training", "alone"):
        for i in range(2):
            layers = [layer[i] for one in some for layer in one[where].values()]
            shown.append(f"{mean(layers):.3f}")
    return shown
