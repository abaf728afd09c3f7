"""What a run is measured in, and the figures of the paper that it stands beside."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from normrnn import norms
from normrnn.report.runs import Run


@dataclass(frozen=True)
class Measure:
    """How a loss in nats is shown."""

    name: str
    long: str
    axis: str
    of: Callable[[float], float]
    digits: int
    log: bool
    unit: str
    held_out: str

    def text(self, loss: float | None) -> str:
        """The figure, or a dash."""
        return "–" if loss is None else f"{self.of(loss):,.{self.digits}f}"


def perplexity(loss: float) -> float:
    """exp of nats, capped so that a diverged run can be shown."""
    return math.exp(min(loss, 50.0))


def bits(loss: float) -> float:
    """Nats as bits."""
    return loss / math.log(2)


WORDS = Measure("perplexity", "perplexity", "perplexity", perplexity, 1, True, "tokens", "valid")
CHARACTERS = Measure(
    "cross entropy",
    "cross entropy in nats per character",
    "nats per character",
    float,
    3,
    False,
    "characters",
    "valid",
)
FRAMES = Measure(
    "FCE", "frame-wise cross entropy (FCE)", "FCE, nats", float, 3, False, "frames", "dev"
)


def measure(runs: Sequence[Run]) -> Measure:
    """Perplexity for words, cross entropy for characters and frames."""
    settings = [run.settings for run in runs]
    if any("fer" in row for run in runs for row in run.rows) or any(
        s.get("recipe") in ("wsj", "librispeech-mini") for s in settings
    ):
        return FRAMES
    return CHARACTERS if any(s.get("text.level") == "char" for s in settings) else WORDS


@dataclass(frozen=True)
class Paper:
    """Rows of one of the paper's tables: (train, held out) of the baseline and the normalised."""

    table: str
    model: str
    norm: str
    baseline: tuple[tuple[float, ...], tuple[float, ...]]
    normalised: tuple[tuple[float, ...], tuple[float, ...]]
    remark: str = ""

    def of(self, norm: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """The figures of an arm."""
        if norm == self.norm:
            return self.normalised
        known = norm in norms.names()
        return self.baseline if known and not norms.of(norm).normalises else None


def _words(model: str, *figures: float) -> Paper:
    a, b, c, d = ((figure,) for figure in figures)
    return Paper("Table 2", model, "frame", (a, b), (c, d))


_SMALL = _words("Small LSTM", 78.5, 119.2, 62.5, 120.9)
# (FCE, FER)
_SPEECH = (((0.95, 0.28), (1.11, 0.33)), ((0.73, 0.22), (1.19, 0.34)))
PAPER = {
    "ptb-small": _SMALL,
    "ptb-small-authors": _SMALL,
    "ptb-medium": _words("Medium LSTM", 49.1, 89.0, 41.0, 90.6),
    "ptb-large": _words("Large LSTM", 49.3, 81.8, 35.0, 97.4),
    "wsj": Paper("Table 1", "BiRNN", "sequence", *_SPEECH),
    "librispeech-mini": Paper(
        "Table 1",
        "BiRNN",
        "sequence",
        *_SPEECH,
        remark="The paper's figures are of the Wall Street Journal corpus, 3,546 states and some"
        " fifty times as much speech: other data, not to be matched.",
    ),
    "ptb-char": Paper(
        "Table 3",
        "Best network",
        "hidden",
        ((1.05,), (1.10,)),
        ((1.07,), (1.11,)),
        remark="The paper's figures are the best of a search over 52 settings.",
    ),
}
