"""A prepared directory of made-up speech: the features tell the label, with noise."""

from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from normrnn.config.base import OptimizerConfig
from normrnn.speech import config
from normrnn.speech.prepare.job import Job, Utterance
from normrnn.speech.prepare.preparation import prepare

DIM, CLASSES = 6, 7
LENGTHS = {"train": [31, 12, 25, 40, 7, 18, 22, 9, 33, 16, 28, 5], "dev": [20, 35, 11]}


def write_speech(path: Path, seed: int = 0, change: float = 0.0) -> None:
    """Prepare train, of four speakers, and dev; class 6 is never seen.

    `change` is added to one number of the first development utterance.
    """
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLASSES, DIM)) * 3 + 10
    prepared, utterances = {}, []
    for split, lengths in LENGTHS.items():
        for number, length in enumerate(lengths):
            y = np.repeat(rng.integers(0, CLASSES - 1, length), rng.integers(1, 4, length))[:length]
            x = (centres[y] + rng.normal(size=(length, DIM))).astype(np.float32)
            x[0, 0] += change if (split, number) == ("dev", 0) else 0
            key = f"{split}{number:02}"
            prepared[key] = x, y
            utterances.append(Utterance(key, f"s{number % 4}", "", split=split))
    utterances.sort(key=lambda u: u.key)
    job = Job({}, utterances, lambda u: prepared[u.key], CLASSES)
    with redirect_stderr(StringIO()):  # its progress
        prepare(job, path, 1)


@pytest.fixture
def speech_dir(tmp_path: Path) -> Path:
    """Such a directory."""
    directory = tmp_path / "speech"
    write_speech(directory)
    return directory


@pytest.fixture
def tiny_speech(speech_dir: Path) -> config.SpeechConfig:
    """A complete config on it."""
    return tiny_speech_config(speech_dir)


def tiny_speech_config(data: Path) -> config.SpeechConfig:
    """A complete config: pieces of at most 15 frames, two validations an epoch."""
    return config.SpeechConfig(
        recipe="librispeech-mini",
        data=str(data),
        epochs=2,
        norm="sequence",
        model=config.AcousticConfig(hidden=5, layers=2),
        optimizer=OptimizerConfig(lr=0.02, momentum=0.9),
        train=config.UtteranceConfig(
            batch=4, segments=2, log_every=2, checkpoint_every=3, piece_frames=15, pool=2
        ),
        evaluation=config.SpeechEvaluationConfig(train_utterances=3, recalibrate_batches=3),
    )


@pytest.fixture
def tiny_baseline(tiny_speech: config.SpeechConfig) -> config.SpeechConfig:
    """The same without normalisation."""
    return replace(tiny_speech, norm="none")
