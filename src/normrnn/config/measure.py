"""What a loss in nats is shown as: perplexity, bits, or itself."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

PERPLEXITY_LIMIT = 50.0
"""Perplexities are capped at e^50 (5e21): one diverging batch must not give an infinite mean."""


def perplexity(loss: float) -> float:
    """exp of nats per token, capped.

    >>> round(perplexity(math.log(120)), 6)
    120.0
    """
    return math.exp(min(loss, PERPLEXITY_LIMIT))


def bits(loss: float) -> float:
    """Nats as bits.

    >>> bits(math.log(2))
    1.0
    """
    return loss / math.log(2)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """How the loss of a task is shown."""

    name: str
    long: str = ""
    """In words; default: the name."""
    axis: str = ""
    """Label of a picture's axis; default: the name."""
    of: Callable[[float], float] = float
    """The figure of a loss in nats."""
    digits: int = 3
    log: bool = False
    """Whether a picture's axis is logarithmic."""
    unit: str = "targets"
    """What is counted: tokens, characters, frames."""
    held_out: str = "valid"
    """The set that no gradient sees."""
    higher_is_better: bool = False
    """Whether larger figures are better; losses are always better the lower they are."""
    batch_mean: tuple[str, Callable[[float], float]] | None = None
    """Key in rows of metrics.jsonl, and figure of a loss, whose mean over batches is shown too."""
    error_rate: tuple[str, str] | None = None
    """Key in rows of metrics.jsonl, and name, of the share of wrong predictions, where counted."""
    columns: Mapping[str, Callable[[float], float]] = field(default_factory=dict)
    """Further figures of the loss in every row of metrics.jsonl, by their key there."""
    brief: tuple[str, Callable[[float], float], int] | None = None
    """What a line has room for beside the loss: name, figure of a loss, digits."""

    def __post_init__(self) -> None:
        for name in ("long", "axis"):
            object.__setattr__(self, name, getattr(self, name) or self.name)

    def text(self, loss: float | None) -> str:
        """The figure, or a dash."""
        return "–" if loss is None else f"{self.of(loss):,.{self.digits}f}"

    def beside(self, loss: float) -> str:
        """What a line says beside the loss, if anything."""
        if self.brief is None:
            return ""
        name, of, digits = self.brief
        return f"{name} {of(loss):,.{digits}f}"

    def quality(self, loss: float, row: Mapping[str, Any], digits: int) -> str:
        """Return the loss, and the error rate of the row or the brief figure."""
        key, name = self.error_rate or ("", "")
        rate = row.get(key)
        beside = self.beside(loss) if rate is None else f"{name} {rate:.2%}"
        return f"loss {loss:.{digits}f}  {beside}".rstrip()

    def row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row of metrics.jsonl with the further figures of its loss."""
        return {**row, **{key: of(row["loss"]) for key, of in self.columns.items()}}


NATS = Measure(name="cross entropy", long="cross entropy in nats", axis="nats")
"""Of a task that says nothing else."""
