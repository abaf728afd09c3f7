"""Settings of a network on arrays."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import Suppress

from normrnn.config import base
from normrnn.config.base import LoopConfig, Measure, OptimizerConfig
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
    convert=lambda loss: math.sqrt(max(loss, 0.0)),
    digits=4,
    log=True,
    brief=("RMSE", lambda loss: math.sqrt(max(loss, 0.0)), 4),
)


@dataclass(frozen=True)
class ArraysConfig:
    """How arrays become training, validation and test sequences."""

    source: Suppress[Literal["file", "adding", "mnist", "permuted-mnist"]] = "file"
    valid: Annotated[float, base.Bounds(0, 1, ends="()")] = 0.15
    """Share of the sequences for validation, where the file has no x_valid."""
    test: base.Probability = 0.15
    """Share of the sequences for the test, where the file has no x_test."""
    split_seed: base.Count = 0
    """Seed of the split, and of generated data; the same for every run."""
    standardise: bool = True
    """Scale features to mean 0 and variance 1 over the training frames."""
    sequences: Annotated[int, base.Bounds(10)] = 5000
    """Sequences of a generated data set."""
    steps: Annotated[int, base.Bounds(2)] = 100
    """Their length."""


@dataclass(frozen=True)
class ArrayModelConfig(base.LayersConfig):
    """Recurrent layers and a linear head, on every step or on the last state."""

    hidden: base.Positive = 64
    """Cells per layer and direction."""
    layers: base.Layers = 1
    """Stacked layers."""
    bidirectional: bool = False
    """Read each sequence in both directions."""
    time_steps: Annotated[int, base.Bounds(-1)] = -1
    """Running statistics kept per time step, this many, by norms that can. 0: shared over time.
    -1: one per step if all training sequences have the same length, else shared."""


@dataclass(frozen=True)
class ArrayEvaluationConfig:
    """What is measured when a segment ends."""

    train_sequences: base.Count = 500
    """Training sequences, evenly spread over the set, scored in eval mode. 0: none."""
    recalibrate_batches: base.Positive = 50
    """Training batches behind recalibrated statistics."""


@dataclass(frozen=True, kw_only=True)
class ArrayConfig(base.Config):
    """One complete experiment on arrays, as saved in `config.json`."""

    noun: ClassVar[str] = "a network on arrays"
    task: ClassVar[str] = "normrnn.arrays.task:ArrayTask"
    is_ragged: ClassVar[bool] = True
    measured: ClassVar[tuple[str, ...]] = ("data_sha256", "arrays.")
    data: str = ""
    """File .npz with x, y and optionally lengths and groups; docs/guides/arrays.md describes it."""
    target: Suppress[Literal["", "classes", "values"]] = ""
    """Set by training: what y holds."""
    target_per: Suppress[Literal["", "sequence", "step"]] = ""
    """Set by training: what has a target."""
    epochs: base.Positive = 20
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
        if self.arrays.valid + self.arrays.test >= 1:
            raise UsageError("arrays.valid and arrays.test leave nothing to train on")

    @classmethod
    def measure(cls, settings: Mapping[str, Any]) -> Measure:
        """Cross entropy of classes, RMSE of values."""
        return VALUES if settings.get("target") == "values" else CLASSES
