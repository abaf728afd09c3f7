"""Settings of a language model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from normrnn.config import base
from normrnn.config.base import Measure, bits
from normrnn.errors import UsageError

PERPLEXITY_LIMIT = 50.0
"""Perplexities are capped at e^50 (5e21): one diverging batch must not give an infinite mean."""


def perplexity(loss: float) -> float:
    """Return exp of nats per token, capped.

    >>> round(perplexity(math.log(120)), 6)
    120.0
    """
    return math.exp(min(loss, PERPLEXITY_LIMIT))


WORDS = Measure(
    name="perplexity",
    convert=perplexity,
    digits=1,
    log=True,
    unit="tokens",
    batch_mean=("batch_ppl", perplexity),
    brief=("ppl", perplexity, 2),
)
CHARACTERS = Measure(
    name="cross entropy",
    long="cross entropy in nats per character",
    axis="nats per character",
    unit="characters",
    batch_mean=("batch_ppl", perplexity),
    columns={"bpc": bits},
    brief=("bpc", bits, 4),
)


@dataclass(frozen=True)
class TextConfig:
    """How a text becomes symbols."""

    level: Literal["word", "char"] = "word"
    """Words separated by blanks, or characters, of which indentation and blank lines are kept; a
    line ends with <eos> in both."""
    max_vocab: base.Count = 0
    """Keep this many most frequent symbols, <unk> for the rest. 0: all of the training text."""
    unknown: bool = True
    """Keep a class <unk> for symbols outside the vocabulary; without it they are an error."""


@dataclass(frozen=True)
class ModelConfig(base.LayersConfig):
    """Embedding, stacked recurrent layers, softmax."""

    hidden: base.Positive = 200
    """Cells per layer."""
    layers: base.Layers = 2
    """Stacked layers."""
    embedding: base.Count = 0
    """Size of the lookup table's vectors. 0: as many as cells."""
    dropout: base.Probability = 0.0
    """On the embedding, between layers and before the softmax; never on the recurrence."""
    initialiser: Literal["uniform", "glorot"] = "uniform"
    """All weights from U(-init, init), or, as in the appendix, the lookup table from N(0, 1), the
    other matrices Glorot's way, biases zero. γ and β are not drawn."""
    init: base.NotNegative = 0.1
    """Bound of the uniform initialiser."""
    time_steps: base.Count = 0
    """Running statistics kept per position in the window, this many, by norms that can. 0: shared
    over time."""


@dataclass(frozen=True)
class TrainConfig(base.LoopConfig):
    """How the text is read."""

    reading: Literal["streams", "sequences"] = "streams"
    """Windows of parallel streams, the state carried from window to window; or sequences of
    `steps` tokens, each from zero state, in another order every epoch."""
    steps: base.Positive = 20
    """Time steps of a window or sequence: how far gradients flow back."""
    epoch_tokens: base.Count = 0
    """An epoch ends after this many tokens, rounded down to whole updates. 0: with the text."""
    shift_streams: bool = False
    """Begin every stream at another place of its part of the text in each epoch, so that
    mini-batches differ between epochs."""


@dataclass(frozen=True)
class EvaluationConfig:
    """What is measured when a segment ends."""

    train_tokens: base.Count = 50_000
    """Tokens from the start of the training text scored in eval mode. 0: none."""
    recalibrate_windows: base.Positive = 100
    """Training windows, in order and without dropout, behind recalibrated statistics."""
    tokens: base.Count = 0
    """Tokens scored of the validation and of the test text, from their start. 0: all."""


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(base.Config):
    """One complete experiment with a language model, as saved in `config.json`."""

    noun: ClassVar[str] = "a language model"
    task: ClassVar[str] = "normrnn.text.task:LanguageTask"
    predicts_inputs: ClassVar[bool] = True
    measured: ClassVar[tuple[str, ...]] = ("data_sha256", "text.", "evaluation.tokens")
    data: str = ""
    """Directory with train, valid and test text, or one text file, or builtin:python-topics."""
    text: TextConfig = field(default_factory=TextConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.shift_streams and self.train.reading != "streams":
            raise UsageError("train.shift_streams is for train.reading streams")

    @classmethod
    def measure(cls, settings: Mapping[str, Any]) -> Measure:
        """Perplexity for words, cross entropy for characters."""
        return CHARACTERS if settings.get("text.level") == "char" else WORDS
