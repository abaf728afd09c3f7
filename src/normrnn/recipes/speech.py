"""Section 5.1: frame-wise speech recognition, Table 1 and Figure 1."""

from dataclasses import replace

from normrnn.config.base import OptimizerConfig
from normrnn.speech.config import AcousticConfig, SpeechConfig, UtteranceConfig


def wsj() -> SpeechConfig:
    """Table 1 and Figure 1.

    That the loss is summed over time and averaged over utterances is an inference: 1e-4 on a mean
    over frames would hardly move. The paper gives no number of epochs.
    """
    return SpeechConfig(
        recipe="wsj",
        epochs=20,
        model=AcousticConfig(hidden=250, layers=5, peephole="output"),
        optimizer=OptimizerConfig(lr=1e-4, momentum=0.9),
        train=UtteranceConfig(batch=24, max_frames=1300),
    )


def librispeech_mini() -> SpeechConfig:
    """Table 1 in the small: an hour or two of speech in pieces, no peephole.

    The learning rate suits the baseline: of 1e-3, 3e-3 and 1e-2 the best after an epoch; with 1e-2
    it diverges.
    """
    return SpeechConfig(
        recipe="librispeech-mini",
        epochs=10,
        model=AcousticConfig(hidden=250, layers=5),
        optimizer=OptimizerConfig(lr=3e-3, momentum=0.9),
        train=UtteranceConfig(batch=16, segments=3, piece_frames=400),
    )


def librispeech_mini_small() -> SpeechConfig:
    """The question of Table 1 in minutes an epoch: `librispeech-mini` with three layers of 128."""
    mini = librispeech_mini()
    return replace(
        mini,
        recipe="librispeech-mini-small",
        model=replace(mini.model, hidden=128, layers=3),
    )


def librispeech_mini_depth() -> SpeechConfig:
    """Does normalisation gain with depth? The small network, with test speakers set aside.

    --model.layers is the depth. Three training speakers are the test set.
    """
    small = librispeech_mini_small()
    return replace(
        small,
        recipe="librispeech-mini-depth",
        evaluation=replace(small.evaluation, test_speakers=3),
    )
