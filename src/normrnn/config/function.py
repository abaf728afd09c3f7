"""Stored runs of a training function of a user's own: their kind in config.json, their measure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from normrnn.config.base import Config
from normrnn.config.measure import Measure

KIND = "function"


def _negative(loss: float) -> float:
    return -loss


@dataclass(frozen=True, kw_only=True)
class FunctionConfig(Config):
    """The config class of such runs; they have no settings but what the function was called with.

    Where higher values are better, the loss of a row is the negative value.
    """

    noun: ClassVar[str] = "a training function"

    @classmethod
    def measure(cls, settings: Mapping[str, Any]) -> Measure:
        """Return the measure of the values that were logged."""
        higher = settings.get("higher_is_better") is True
        return Measure(
            name="value",
            long="value, higher is better" if higher else "value, lower is better",
            axis="value",
            convert=_negative if higher else float,
            digits=4,
            log=False,
            unit="values",
            held_out="valid",
            higher_is_better=higher,
        )
