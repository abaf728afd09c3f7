"""A comparison that needs no data: the text that ships inside every Python."""

from normrnn.config.base import OptimizerConfig
from normrnn.text.config import (
    EvaluationConfig,
    LanguageConfig,
    ModelConfig,
    TextConfig,
    TrainConfig,
)


def quickstart() -> LanguageConfig:
    """A minute on two cores with Python's own documentation."""
    return LanguageConfig(
        recipe="quickstart",
        data="builtin:python-topics",
        epochs=6,
        text=TextConfig(max_vocab=2000),
        model=ModelConfig(hidden=128, layers=2, init=0.1),
        optimizer=OptimizerConfig(lr=1.0, clip_norm=5.0, decay=2.0, decay_after=4),
        train=TrainConfig(batch=32, steps=20, log_every=10, checkpoint_every=100),
        evaluation=EvaluationConfig(train_tokens=10_000, recalibrate_windows=50),
    )
