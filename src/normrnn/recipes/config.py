"""Typed, complete settings of a run. No torch in here: `normrnn --help` reads this file.

Every class is frozen and flat, every field has a name that appears on the command line
(`--model.hidden 200`) and in `config.json`. A field added later needs a default, so that old
run directories stay readable.
"""

from dataclasses import dataclass, field
from typing import Literal

from tyro.conf import Suppress

from normrnn.errors import UsageError

Norm = Literal["none", "frame", "sequence", "hidden"]


@dataclass(frozen=True)
class TextConfig:
    """How a text becomes symbols."""

    level: Literal["word", "char"] = "word"
    """Words separated by blanks, or characters; a line ends with <eos> in both."""
    max_vocab: int = 0
    """Keep this many most frequent symbols, <unk> for the rest. 0: all of the training text."""
    unknown: bool = True
    """Keep a class <unk> for symbols outside the vocabulary; without it they are an error."""


@dataclass(frozen=True)
class ModelConfig:
    """Embedding, stacked LSTM, softmax."""

    hidden: int = 200
    """Cells per layer."""
    layers: int = 2
    """Stacked LSTM layers."""
    embedding: int = 0
    """Size of the lookup table's vectors. 0: as many as cells."""
    dropout: float = 0.0
    """On the embedding, between layers and before the softmax; never on the recurrence."""
    init: float = 0.1
    """Weights from U(-init, init); γ and β are not drawn."""
    peephole: Literal["none", "output", "all"] = "none"
    """Diagonal peepholes of the LSTM: the paper's W_co, or all three."""
    gamma: float = 1.0
    """Initial γ of the normalisers."""
    eps: float = 1e-5
    """ε of the normalisers (the authors' code: 1e-6)."""
    momentum: float = 0.1
    """Weight of the new value in the running statistics."""
    time_steps: int = 0
    """Running statistics kept per position in the window, this many. 0: shared over time."""


@dataclass(frozen=True)
class OptimizerConfig:
    """One gradient step."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    """Method."""
    lr: float = 1.0
    """Learning rate of the first epochs."""
    momentum: float = 0.0
    """Momentum of sgd."""
    weight_decay: float = 0.0
    """Weight decay."""
    clip_norm: float = 0.0
    """Gradients with a larger global norm are scaled down to it. 0: never."""
    loss: Literal["sum_over_time", "mean"] = "sum_over_time"
    """What is differentiated: the loss summed over time and averaged over the batch, as Zaremba's
    and the authors' code do, or averaged over both, a step smaller by the window's length."""
    decay: float = 1.0
    """The learning rate is divided by this at every epoch after `decay_after`."""
    decay_after: int = 1
    """The last epoch (1-based) at the full learning rate."""


@dataclass(frozen=True)
class TrainConfig:
    """Batches, and when to log and save."""

    batch: int = 32
    """Parallel streams."""
    steps: int = 20
    """Time steps of a window: how far gradients flow back."""
    segments: int = 1
    """Parts of an epoch. Each starts from zero state and ends with a validation."""
    log_every: int = 100
    """Updates per train row of metrics.jsonl."""
    checkpoint_every: int = 200
    """Updates between checkpoints inside an epoch."""


@dataclass(frozen=True)
class EvaluationConfig:
    """What is measured when a segment ends."""

    train_tokens: int = 50_000
    """Tokens from the start of the training text scored in eval mode. 0: none."""
    recalibrate_windows: int = 100
    """Training windows, in order and without dropout, behind recalibrated statistics."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One complete experiment, as saved in `config.json`."""

    recipe: Suppress[str]
    norm: Norm = "none"
    """Normalisation of the recurrent layers; none is the baseline."""
    data: str = ""
    """Directory with train, valid and test text, or one text file, or builtin:python-topics."""
    data_sha256: Suppress[str] = ""
    epochs: int = 15
    """Passes over the training data."""
    seed: int = 1
    """Seed of weights and dropout."""
    device: str = "cpu"
    """Where to train: cpu, cuda, cuda:1 ..."""
    threads: int = 0
    """Threads of the tensor library. 0: its own choice."""
    text: TextConfig = field(default_factory=TextConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        for name, value, low in (
            ("epochs", self.epochs, 1),
            ("threads", self.threads, 0),
            ("text.max_vocab", self.text.max_vocab, 0),
            ("model.hidden", self.model.hidden, 1),
            ("model.layers", self.model.layers, 1),
            ("model.embedding", self.model.embedding, 0),
            ("model.init", self.model.init, 0),
            ("model.eps", self.model.eps, 0),
            ("model.time_steps", self.model.time_steps, 0),
            ("optimizer.lr", self.optimizer.lr, 0),
            ("optimizer.clip_norm", self.optimizer.clip_norm, 0),
            ("optimizer.decay_after", self.optimizer.decay_after, 1),
            ("train.batch", self.train.batch, 1),
            ("train.steps", self.train.steps, 1),
            ("train.segments", self.train.segments, 1),
            ("train.log_every", self.train.log_every, 1),
            ("train.checkpoint_every", self.train.checkpoint_every, 1),
            ("evaluation.train_tokens", self.evaluation.train_tokens, 0),
            ("evaluation.recalibrate_windows", self.evaluation.recalibrate_windows, 1),
        ):
            if not value >= low:
                raise UsageError(f"{name} must be at least {low}, not {value}")
        if not 0 <= self.model.dropout < 1:
            raise UsageError(f"model.dropout must lie in [0, 1), not {self.model.dropout}")
        if not self.optimizer.decay > 0:
            raise UsageError(f"optimizer.decay must be positive, not {self.optimizer.decay}")
        if self.norm != "none" and self.train.batch < 2:
            raise UsageError(f"norm {self.norm} needs train.batch of at least 2, not 1")
        if self.norm == "sequence" and self.model.time_steps:
            raise UsageError("model.time_steps is for norm frame or hidden, not sequence")
        if self.norm == "hidden" and not self.model.time_steps:
            raise UsageError("norm hidden needs model.time_steps: one set of statistics per step")
