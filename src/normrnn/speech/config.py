"""Settings of an acoustic model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from normrnn.config.base import Config, Count, Layers, LayersConfig, LoopConfig, Measure, Positive

FRAMES = Measure(
    name="FCE",
    long="frame-wise cross entropy (FCE)",
    axis="FCE, nats",
    unit="frames",
    held_out="dev",
    error_rate=("fer", "FER"),
)


@dataclass(frozen=True)
class AcousticConfig(LayersConfig):
    """Stacked LSTM, softmax over the states of the alignment."""

    hidden: Positive = 250
    """Cells per layer and direction."""
    layers: Layers = 5
    """Stacked LSTM layers."""
    bidirectional: bool = True
    """Read each utterance in both directions."""


@dataclass(frozen=True)
class UtteranceConfig(LoopConfig):
    """Ragged batches of utterances."""

    batch: Positive = 24
    segments: Positive = 4
    log_every: Positive = 20
    checkpoint_every: Positive = 50
    max_frames: Count = 0
    """Longer utterances are left out of training. 0: none are."""
    piece_frames: Count = 0
    """Training utterances are cut into pieces of at most this many frames. 0: they are not."""
    pool: Positive = 16
    """Batches drawn together and sorted by length, so that a batch has utterances of similar
    lengths: more makes batches less ragged and less random."""


@dataclass(frozen=True)
class SpeechEvaluationConfig:
    """What is measured when a segment ends."""

    train_utterances: Count = 40
    """Training utterances, evenly spread over the set, scored in eval mode. 0: none."""
    recalibrate_batches: Positive = 50
    """Training batches behind recalibrated statistics in `normrnn evaluate`."""
    test_speakers: Count = 0
    """Training speakers set aside as a test set, evenly spread over their names. Mean and variance
    of the features are those of all training speakers."""


@dataclass(frozen=True, kw_only=True)
class SpeechConfig(Config):
    """One complete experiment with an acoustic model, as saved in `config.json`."""

    noun: ClassVar[str] = "an acoustic model"
    task: ClassVar[str] = "normrnn.speech.task:SpeechTask"
    is_ragged: ClassVar[bool] = True
    measured: ClassVar[tuple[str, ...]] = ("data_sha256", "evaluation.test_speakers")
    data: str = ""
    """Directory that `normrnn prepare librispeech` or `normrnn prepare kaldi` made."""
    model: AcousticConfig = field(default_factory=AcousticConfig)
    train: UtteranceConfig = field(default_factory=UtteranceConfig)
    evaluation: SpeechEvaluationConfig = field(default_factory=SpeechEvaluationConfig)

    @classmethod
    def measure(cls, settings: Mapping[str, Any]) -> Measure:  # noqa: ARG003
        """The paper's frame-wise cross entropy."""
        return FRAMES
