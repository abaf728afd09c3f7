"""What the loss of a task is shown as."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


def bits(loss: float) -> float:
    """Convert nats to bits.

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
    convert: Callable[[float], float] = float
    """What is shown of a loss in nats. Rows of a user's own task have it: finite for any loss."""
    digits: int = 3
    log: bool = False
    """Whether a picture's axis is logarithmic."""
    unit: str = "targets"
    """Plural of what is counted."""
    held_out: str = "valid"
    """What the split for validation is called."""
    higher_is_better: bool = False
    """Whether larger values are better; losses are always better the lower they are."""
    batch_mean: tuple[str, Callable[[float], float]] | None = None
    """Key in rows of metrics.jsonl, and function of a loss whose mean over batches is shown too."""
    error_rate: tuple[str, str] | None = None
    """Key in rows of metrics.jsonl, and name, of the share of wrong predictions, where counted."""
    columns: Mapping[str, Callable[[float], float]] = field(default_factory=dict)
    """Further functions of the loss in every row of metrics.jsonl, by their key there."""
    brief: tuple[str, Callable[[float], float], int] | None = None
    """What a line of output shows beside the loss: name, function of the loss, digits."""

    def __post_init__(self) -> None:
        for name in ("long", "axis"):
            object.__setattr__(self, name, getattr(self, name) or self.name)

    def text(self, loss: float | None) -> str:
        """Return what is shown of a loss, or a dash."""
        return "–" if loss is None else f"{self.convert(loss):,.{self.digits}f}"

    def quality(self, loss: float, row: Mapping[str, Any], digits: int) -> str:
        """Return the loss, with the error rate of the row or what `brief` says."""
        text = f"loss {loss:.{digits}f}"
        if self.error_rate and row.get(self.error_rate[0]) is not None:
            return f"{text}  {self.error_rate[1]} {row[self.error_rate[0]]:.2%}"
        if self.brief:
            name, convert, shown = self.brief
            return f"{text}  {name} {convert(loss):,.{shown}f}"
        return text


SHOWN = ("name", "long", "unit", "digits", "higher_is_better")
"""What config.json has of the measure of a user's own task."""
NATS = Measure(name="cross entropy", long="cross entropy in nats", axis="nats")
"""Default measure."""
