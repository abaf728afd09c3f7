"""The paper's figures, tables and search, once: what experiments stand beside."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from normrnn import norms

Figures = tuple[float, float]
"""Losses of the training and of the held-out set."""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Rows of one of the paper's tables: the baseline and the normalised network."""

    norm: str
    loss: str
    """What the losses are, in words."""
    baseline: Figures
    normalised: Figures
    digits: int = 2
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arm -> the settings of its row, where the paper searched for them."""
    same_data: bool = True
    """Whether the recipe trains on the paper's data."""

    @property
    def words(self) -> str:
        """The losses in a line; empty where they are of other data."""
        if not self.same_data:
            return ""
        arms = (self.baseline, self.normalised)
        a, b = ("/".join(f"{loss:.{self.digits}f}" for loss in losses) for losses in arms)
        return f"paper, {self.loss}: {a}; normalised {b}"

    def of(self, norm: str) -> Figures | None:
        """The figures of an arm."""
        if norm == self.norm:
            return self.normalised
        known = norm in norms.names()
        return self.baseline if known and not norms.get(norm).normalises else None


def _words(baseline: Figures, normalised: Figures) -> Paper:
    loss = "train/valid"
    return Paper(norm="frame", loss=loss, baseline=baseline, normalised=normalised, digits=1)


_SMALL = _words((78.5, 119.2), (62.5, 120.9))
_SPEECH = Paper(
    norm="sequence", loss="FCE train/dev", baseline=(0.95, 1.11), normalised=(0.73, 1.19)
)
_OTHER_SPEECH = replace(_SPEECH, same_data=False)
"""The paper's figures are of the Wall Street Journal, 3,546 states and fifty times the speech."""
PAPER = {
    "ptb-small": _SMALL,
    "ptb-small-authors": _SMALL,
    "ptb-medium": _words((49.1, 89.0), (41.0, 90.6)),
    "ptb-large": _words((49.3, 81.8), (35.0, 97.4)),
    "wsj": _SPEECH,
    "librispeech-mini": _OTHER_SPEECH,
    "librispeech-mini-small": _OTHER_SPEECH,
    "librispeech-mini-depth": _OTHER_SPEECH,
    "ptb-char": Paper(
        norm="hidden",
        loss="nats train/valid",
        baseline=(1.05, 1.10),
        normalised=(1.07, 1.11),
        settings={
            "none": {"optimizer.lr": 0.42, "optimizer.momentum": 0.95, "train.batch": 32},
            "hidden": {"optimizer.lr": 3.71e-4, "optimizer.momentum": 0.995, "train.batch": 128},
        },
    ),
}
"""Recipe -> what it stands beside."""

SPACES: dict[str, dict[str, Any]] = {
    # The appendix's.
    "ptb-char": {
        "optimizer.lr": {"low": 1e-4, "high": 1.0, "log": True},
        "optimizer.momentum": [0.5, 0.8, 0.9, 0.95, 0.995],
        "train.batch": [32, 64, 128],
    },
    # Ours: how strong the regularisers are.
    "ptb-small-regularised": {
        "model.dropout": [0.15, 0.3, 0.45],
        "model.weight_drop": [0.15, 0.4],
    },
}
"""What a search of a recipe varies unless it is told."""
