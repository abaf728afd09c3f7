"""Running sums of the train row that is not written yet."""

from dataclasses import dataclass
from typing import Any

from normrnn.config.measure import Measure


@dataclass
class RowSums:
    """Sums since the last train row; part of the checkpoint, so that a resume splits no row."""

    total: float = 0.0
    count: int = 0
    updates: int = 0
    batch_mean: float = 0.0
    grad_norm: float = 0.0
    errors: int | None = None

    def add(
        self, total: float, count: int, grad_norm: float, errors: int | None, measure: Measure
    ) -> None:
        """Add an update."""
        if errors is not None:
            self.errors = errors + (self.errors or 0)
        self.total += total
        self.count += count
        self.updates += 1
        self.grad_norm += grad_norm
        if measure.batch_mean:
            self.batch_mean += measure.batch_mean[1](total / count)

    def row(self, measure: Measure) -> dict[str, Any]:
        """Return the loss and the error rate per target, and means over the updates."""
        row: dict[str, Any] = {"loss": self.total / self.count}
        if measure.error_rate and self.errors is not None:
            row[measure.error_rate[0]] = self.errors / self.count
        row["count"] = self.count
        if measure.batch_mean:
            row[measure.batch_mean[0]] = self.batch_mean / self.updates
        return {**row, "grad_norm": self.grad_norm / self.updates}
