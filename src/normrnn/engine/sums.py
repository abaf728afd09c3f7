"""The loss of a batch, and over batches: of a split, or of the train row not written yet."""

from dataclasses import dataclass

from torch import Tensor

from normrnn.config.measure import Measure
from normrnn.runs.rows import Row

State = tuple[Tensor, ...]
"""What flows from batch to batch, each tensor (layers, B, H)."""


@dataclass(frozen=True)
class Loss:
    """The loss of a batch, on the device: reading its value would wait for the device."""

    total: Tensor
    """Summed over the targets."""
    errors: Tensor | None = None
    """Number of wrong classes, where they are counted."""
    objective: Tensor | None = None
    """What is differentiated instead of `total`: the same loss in other units."""
    state: State | None = None
    """The state after the batch, of a network that carries one."""
    count: int = 0
    """Targets, on all ranks; set by the task."""
    sequences: int = 0
    """Sequences or streams, on all ranks; set by the task."""

    @property
    def differentiable(self) -> Tensor:
        """Return the objective, or else the total."""
        return self.total if self.objective is None else self.objective


@dataclass
class Sums:
    """Sums over batches; those of a train row are part of the checkpoint."""

    total: float = 0.0
    """Of the losses, over all targets."""
    count: int = 0
    """Targets."""
    errors: int | None = None
    """Wrong predictions, where they are counted."""
    figures: float = 0.0
    """Of the batches' figures, where the measure shows their mean."""
    batches: int = 0
    """Batches in `figures` and `grad_norm`."""
    grad_norm: float = 0.0

    def add(
        self,
        total: float,
        count: int,
        errors: int | None,
        measure: Measure,
        *,
        grad_norm: float = 0.0,
        is_full: bool = True,
    ) -> None:
        """Add a batch; a remainder does not count in means over batches."""
        if errors is not None:
            self.errors = errors + (self.errors or 0)
        self.total += total
        self.count += count
        if is_full:
            self.batches += 1
            self.grad_norm += grad_norm
            self.figures += measure.batch_mean[1](total / count) if measure.batch_mean else 0.0

    @property
    def loss(self) -> float:
        """Loss per target."""
        return self.total / self.count

    def row(self, measure: Measure) -> Row:
        """Return loss, error rate, count and mean over batches, as far as the measure has them."""
        row: Row = {"loss": self.loss}
        if measure.error_rate and self.errors is not None:
            row[measure.error_rate[0]] = self.errors / self.count
        row["count"] = self.count
        if measure.batch_mean:
            row[measure.batch_mean[0]] = self.figures / self.batches
        return row
