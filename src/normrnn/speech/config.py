"""Settings of an acoustic model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from normrnn.config.base import Config, LayersConfig, LoopConfig
from normrnn.config.measure import Measure
from normrnn.errors import UsageError

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

    hidden: int = 250
    """Cells per layer and direction."""
    layers: int = 5
    """Stacked LSTM layers."""
    bidirectional: bool = True
    """Read each utterance in both directions."""


@dataclass(frozen=True)
class UtteranceConfig(LoopConfig):
    """Ragged batches of utterances."""

    batch: int = 24
    segments: int = 4
    log_every: int = 20
    checkpoint_every: int = 50
    max_frames: int = 0
    """Longer utterances are left out of training. 0: none are."""
    piece_frames: int = 0
    """Training utterances are cut into pieces of at most this many frames. 0: they are not."""
    pool: int = 16
    """Batches drawn together and sorted by length, so that a batch has utterances of similar
    lengths: more makes batches less ragged and less random."""


@dataclass(frozen=True)
class SpeechEvaluationConfig:
    """What is measured when a segment ends."""

    train_utterances: int = 40
    """Training utterances, evenly spread over the set, scored in eval mode. 0: none."""
    recalibrate_batches: int = 50
    """Training batches behind recalibrated statistics in `normrnn evaluate`."""


@dataclass(frozen=True, kw_only=True)
class SpeechConfig(Config):
    """One complete experiment with an acoustic model, as saved in `config.json`."""

    noun: ClassVar[str] = "an acoustic model"
    task: ClassVar[str] = "normrnn.speech.task:SpeechTask"
    hub_task: ClassVar[str] = "automatic-speech-recognition"
    data: str = ""
    """Directory that `normrnn prepare librispeech` or `normrnn prepare kaldi` made."""
    model: AcousticConfig = field(default_factory=AcousticConfig)
    train: UtteranceConfig = field(default_factory=UtteranceConfig)
    evaluation: SpeechEvaluationConfig = field(default_factory=SpeechEvaluationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.check()
        self._at_least(
            ("train.max_frames", self.train.max_frames, 0),
            ("train.piece_frames", self.train.piece_frames, 0),
            ("train.pool", self.train.pool, 1),
            ("evaluation.train_utterances", self.evaluation.train_utterances, 0),
            ("evaluation.recalibrate_batches", self.evaluation.recalibrate_batches, 1),
        )
        norm = self.normalisation
        if norm.more_rows_than_features and not self.model.shrinkage:
            raise UsageError(
                f"norm {self.norm} needs model.shrinkage above 0, as 0.1: an epoch's last batch"
                " may have fewer frames than features"
            )

    @classmethod
    def measure(cls, settings: Mapping[str, Any]) -> Measure:  # noqa: ARG003
        """The paper's frame-wise cross entropy."""
        return FRAMES
