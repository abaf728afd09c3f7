"""Small texts and settings that train in a second."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from normrnn.recipes.config import (
    Config,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def write_text(path: Path, lines: int, seed: int) -> None:
    """A text with something to learn: each word narrows down the next."""
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(24)]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(lines):
            at = rng.randrange(24)
            line = []
            for _ in range(rng.randrange(3, 9)):
                line.append(words[at])
                at = (3 * at + rng.randrange(4)) % 24
            file.write(" ".join(line) + "\n")


@pytest.fixture
def text_dir(tmp_path: Path) -> Path:
    """A directory with train.txt, valid.txt and test.txt: about 2,000 and twice 250 tokens."""
    directory = tmp_path / "text"
    directory.mkdir()
    for seed, (name, lines) in enumerate((("train", 320), ("valid", 40), ("test", 40))):
        write_text(directory / f"{name}.txt", lines, seed)
    return directory


@pytest.fixture
def tiny(text_dir: Path) -> Config:
    """A complete config on that text: 50-odd updates an epoch in two segments, dropout, decay."""
    return Config(
        recipe="ptb-small",
        data=str(text_dir),
        epochs=3,
        model=ModelConfig(hidden=12, dropout=0.25, init=0.2),
        optimizer=OptimizerConfig(lr=0.7, clip_norm=0.5, decay=2.0, decay_after=2),
        train=TrainConfig(batch=8, steps=5, segments=2, log_every=7, checkpoint_every=10),
        evaluation=EvaluationConfig(train_tokens=300, recalibrate_windows=6),
    )


@pytest.fixture
def tiny_frame(tiny: Config) -> Config:
    """The same, normalised frame-wise."""
    return replace(tiny, norm="frame")
