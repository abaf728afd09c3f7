"""Language models: sections 5.2 and the appendix on Penn Treebank, and a comparison without data.

The paper changed Zaremba's settings: batch 32, clip norm 10/5/5, 15/40/55 epochs.
"""

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


def ptb_small() -> LanguageConfig:
    """Table 2, small LSTM."""
    return LanguageConfig(
        recipe="ptb-small",
        epochs=15,
        model=ModelConfig(hidden=200, layers=2, init=0.1, dropout=0.0),
        optimizer=OptimizerConfig(lr=1.0, clip_norm=10.0, decay=2.0, decay_after=6),
        train=TrainConfig(batch=32, steps=20),
    )


def ptb_small_regularised() -> LanguageConfig:
    """The small LSTM with locked dropout and weight drop: where normalisation might pay.

    Dropout is locked on the embedding, between layers and before the softmax. How strong the
    regularisers are was searched for on the baseline, with half the text and half the epochs; all
    networks have the same.
    """
    return LanguageConfig(
        recipe="ptb-small-regularised",
        epochs=10,
        model=ModelConfig(
            hidden=200, layers=2, init=0.1, dropout=0.15, dropout_kind="locked", weight_drop=0.15
        ),
        optimizer=OptimizerConfig(lr=1.0, clip_norm=10.0, decay=2.0, decay_after=6),
        train=TrainConfig(batch=32, steps=20),
    )


def ptb_medium() -> LanguageConfig:
    """Table 2, medium LSTM."""
    return LanguageConfig(
        recipe="ptb-medium",
        epochs=40,
        model=ModelConfig(hidden=650, layers=2, init=0.05, dropout=0.5),
        optimizer=OptimizerConfig(lr=1.0, clip_norm=5.0, decay=1.2, decay_after=6),
        train=TrainConfig(batch=32, steps=35),
    )


def ptb_large() -> LanguageConfig:
    """Table 2 and Figure 2, large LSTM.

    The paper gives no dropout rate; 0.65 is the authors' code's and Zaremba's.
    """
    return LanguageConfig(
        recipe="ptb-large",
        epochs=55,
        model=ModelConfig(hidden=1500, layers=2, init=0.04, dropout=0.65),
        optimizer=OptimizerConfig(lr=1.0, clip_norm=5.0, decay=1.15, decay_after=15),
        train=TrainConfig(batch=32, steps=35),
    )


def ptb_small_authors() -> LanguageConfig:
    """Table 2, small LSTM as the authors' script was left: 5 epochs, half-epoch segments.

    ε and per-position batch statistics are their code's as well. Running statistics stay shared
    over time: theirs were never used in validation.
    """
    return LanguageConfig(
        recipe="ptb-small-authors",
        epochs=5,
        model=ModelConfig(hidden=200, layers=2, init=0.1, dropout=0.0, eps=1e-6),
        optimizer=OptimizerConfig(lr=1.0, clip_norm=5.0, decay=2.0, decay_after=4),
        train=TrainConfig(batch=32, steps=20, segments=2),
    )


def ptb_char() -> LanguageConfig:
    """Table 3, characters, three tanh layers.

    Learning rate, momentum and batch are the paper's best setting of the baseline; that of the
    normalised network is 3.71e-4, 0.995, 128. The loss is averaged over all symbols: the paper
    does not say, but 0.42 with momentum 0.95 on a sum would diverge.
    """
    return LanguageConfig(
        recipe="ptb-char",
        epochs=20,
        # Every character of Penn Treebank is in its training text: 50 classes, <eos> included.
        text=TextConfig(level="char", unknown=False),
        model=ModelConfig(
            cell="rnn", hidden=250, layers=3, embedding=250, initialiser="glorot", time_steps=100
        ),
        optimizer=OptimizerConfig(lr=0.42, momentum=0.95, loss="mean"),
        train=TrainConfig(batch=32, reading="sequences", steps=100),
    )
