"""Settings of a network on arrays."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tyro.conf import Suppress

from normrnn.config.base import Config, LayersConfig, LoopConfig, OptimizerConfig
from normrnn.config.measure import Measure
from normrnn.errors import UsageError

CLASSES = Measure(
    name="cross entropy",
    long="cross entropy in nats per target",
    axis="nats",
    error_rate=("error", "error"),
)
VALUES = Measure(
    name="RMSE",
    long="root mean squared error",
    of=lambda loss: math.sqrt(max(loss, 0.0)),
    digits=4,
    log=True,
    brief=("RMSE", lambda loss: math.sqrt(max(loss, 0.0)), 4),
)


@dataclass(frozen=True)
class ArraysConfig:
    """How arrays become training, validation and test sequences."""

    source: Suppress[Literal["file", "adding", "mnist", "permuted-mnist"]] = "file"
    valid: float = 0.15
    """Share of the sequences for validation, where the file has no x_valid."""
    test: float = 0.15
    """Share of the sequences for the test, where the file has no x_test."""
    split_seed: int = 0
    """Seed of the split, and of generated data; the same for every run."""
    standardise: bool = True
    """Scale features to mean 0 and variance 1 over the training frames."""
    sequences: int = 5000
    """Sequences of a generated data set."""
    steps: int = 100
    """Their length."""


@dataclass(frozen=True)
class ArrayModelConfig(LayersConfig):
    """Recurrent layers and a linear head, on every step or on the last state."""

    hidden: int = 64
    """Cells per layer and direction."""
    layers: int = 1
    """Stacked layers."""
    bidirectional: bool = False
    """Read each sequence in both directions."""
    time_steps: int = -1
    """Running statistics kept per time step, this many, by norms that can. 0: shared over time.
    -1: one per step if all training sequences have the same length, else shared."""


@dataclass(frozen=True)
class ArrayEvaluationConfig:
    """What is measured when a segment ends."""

    train_sequences: int = 500
    """Training sequences, evenly spread over the set, scored in eval mode. 0: none."""
    recalibrate_batches: int = 50
    """Training batches behind recalibrated statistics."""


@dataclass(frozen=True, kw_only=True)
class ArrayConfig(Config):
    """One complete experiment on arrays, as saved in `config.json`."""

    noun: ClassVar[str] = "a network on arrays"
    task: ClassVar[str] = "normrnn.arrays.task:ArrayTask"
    data: str = ""
    """File .npz with x, y and optionally lengths and groups; docs/guides/arrays.md describes it."""
    target: Suppress[Literal["", "classes", "values"]] = ""
    """Set by training: what y holds."""
    target_per: Suppress[Literal["", "sequence", "step"]] = ""
    """Set by training: what has a target."""
    epochs: int = 20
    """Passes over the training data."""
    arrays: ArraysConfig = field(default_factory=ArraysConfig)
    model: ArrayModelConfig = field(default_factory=ArrayModelConfig)
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(name="adam", lr=3e-3, clip_norm=1.0, loss="mean")
    )
    train: LoopConfig = field(default_factory=lambda: LoopConfig(batch=32, log_every=20))
    evaluation: ArrayEvaluationConfig = field(default_factory=ArrayEvaluationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.check()
        self._at_least(
            ("arrays.split_seed", self.arrays.split_seed, 0),
            ("arrays.sequences", self.arrays.sequences, 10),
            ("arrays.steps", self.arrays.steps, 2),
            ("model.time_steps", self.model.time_steps, -1),
            ("evaluation.train_sequences", self.evaluation.train_sequences, 0),
            ("evaluation.recalibrate_batches", self.evaluation.recalibrate_batches, 1),
        )
        valid, test = self.arrays.valid, self.arrays.test
        if not (0 < valid < 1 and 0 <= test < 1 and valid + test < 1):
            raise UsageError(
                f"arrays.valid {valid} and arrays.test {test} must be shares that leave sequences"
                " for training"
            )
        norm = self.normalisation
        if norm.keeps_statistics and self.train.batch < 2:
            raise UsageError(f"norm {self.norm} needs train.batch of at least 2, not 1")
        if norm.more_rows_than_features and not self.model.shrinkage:
            raise UsageError(f"norm {self.norm} needs model.shrinkage above 0, as 0.1")

    @classmethod
    def measure(cls, settings: Mapping[str, Any]) -> Measure:
        """Cross entropy of classes, RMSE of values."""
        return VALUES if settings.get("target") == "values" else CLASSES
