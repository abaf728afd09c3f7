"""Statistics of a network's normalisers: copied, replaced and restored.

- running: the buffers as training left them;
- recalibrated: population statistics over training batches, without dropout;
- batch: each batch's own, as the authors' code validated.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from normrnn.errors import UserError
from normrnn.runs.rows import Row

Tensors = dict[str, Tensor]
StatisticsKind = Literal["running", "recalibrated", "batch"]
BEST_VALID = "best_valid"
"""Split of the rows that the selected model gets on validation data at the end of a run."""


def statistics_of(model: nn.Module) -> Tensors:
    """Return a copy of all buffers of the model."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def set_statistics(model: nn.Module, statistics: Tensors) -> None:
    """Restore a copy; UserError if it is of another network."""
    buffers = dict(model.named_buffers())
    if any(n not in buffers or v.shape != buffers[n].shape for n, v in statistics.items()):
        raise UserError("the saved statistics belong to another network")
    with torch.no_grad():
        for name, value in statistics.items():
            buffers[name].copy_(value)


@contextlib.contextmanager
def using(model: nn.Module, statistics: Tensors) -> Iterator[None]:
    """Use these statistics inside the block; the model's own are restored."""
    before = statistics_of(model)
    set_statistics(model, statistics)
    try:
        yield
    finally:
        set_statistics(model, before)


def both_kinds(population: Tensors) -> dict[StatisticsKind, Tensors]:
    """Return running statistics (the model's own) and recalibrated ones if there are any."""
    return {"running": {}, "recalibrated": population} if population else {"running": {}}


def better_kind(rows: Iterable[Row]) -> StatisticsKind:
    """Return the kind of statistics with the lowest validation loss of the selected model.

    Batch statistics are left out: they depend on the rest of a batch. Running ones win a tie.

    >>> rows = [("running", 5.0), ("recalibrated", 4.9), ("batch", 4.0)]
    >>> better_kind({"split": "best_valid", "statistics": k, "loss": v} for k, v in rows)
    'recalibrated'
    """
    losses = {row["statistics"]: row["loss"] for row in rows if row["split"] == BEST_VALID}
    recalibrated = losses.get("recalibrated", math.inf) < losses.get("running", math.inf)
    return "recalibrated" if recalibrated else "running"
