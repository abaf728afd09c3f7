"""Small texts and settings that train in a second."""

import io
import json
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normrnn.config.base import Config, OptimizerConfig
from normrnn.engine.callbacks import Callback
from normrnn.engine.loop import Trainer, train
from normrnn.runs.records import Note, read_note
from normrnn.runs.store import RunDirectory
from normrnn.text.config import EvaluationConfig, LanguageConfig, ModelConfig, TrainConfig
from normrnn.text.corpus import Vocabulary


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


def write_texts(directory: Path) -> None:
    """train.txt, valid.txt and test.txt: about 2,000 and twice 250 tokens."""
    for seed, (name, lines) in enumerate((("train", 320), ("valid", 40), ("test", 40))):
        write_text(directory / f"{name}.txt", lines, seed)


@pytest.fixture
def text_dir(tmp_path: Path) -> Path:
    """A directory with those three texts."""
    directory = tmp_path / "text"
    directory.mkdir()
    write_texts(directory)
    return directory


@pytest.fixture
def tiny(text_dir: Path) -> LanguageConfig:
    """A complete config on that text."""
    return tiny_config(text_dir)


def tiny_config(data: Path) -> LanguageConfig:
    """A complete config: 50-odd updates an epoch in two segments, dropout, decay."""
    return LanguageConfig(
        recipe="ptb-small",
        data=str(data),
        epochs=3,
        model=ModelConfig(hidden=12, dropout=0.25, init=0.2),
        optimizer=OptimizerConfig(lr=0.7, clip_norm=0.5, decay=2.0, decay_after=2),
        train=TrainConfig(batch=8, steps=5, segments=2, log_every=7, checkpoint_every=10),
        evaluation=EvaluationConfig(train_tokens=300, recalibrate_windows=6),
    )


@pytest.fixture
def tiny_frame(tiny: LanguageConfig) -> LanguageConfig:
    """The same, normalised frame-wise."""
    return replace(tiny, norm="frame")


@pytest.fixture
def saved_with_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs keep running statistics, whichever kind is better on their few frames."""
    monkeypatch.setattr("normrnn.engine.loop.better_kind", lambda _: "running")


@contextmanager
def after_updates(calls: Mapping[int, Callable[[], object]]) -> Iterator[None]:
    """Call functions at the end of some updates."""
    step = Trainer.step

    def stepped(trainer: Trainer, epoch: int, index: int) -> Any:
        result = step(trainer, epoch, index)
        calls.get(trainer.progress.updates + 1, lambda: None)()
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", stepped)
        yield


def run_tiny(
    config: Config,
    out: Path,
    stop_at: int = -1,
    callbacks: Sequence[Callback] = (),
    logs: Sequence[str] = (),
) -> list[str]:
    """Train, with Ctrl-C in an update; the lines that were printed."""
    ctrl_c = {stop_at: lambda: signal.raise_signal(signal.SIGINT)}
    with after_updates(ctrl_c), redirect_stdout(io.StringIO()) as out_text:
        train(config, out, callbacks, logs)
    return out_text.getvalue().splitlines()


def vocabulary_of(out: Path) -> Vocabulary:
    """The vocabulary in a run's model file."""
    return Vocabulary.from_json(RunDirectory(out).model_metadata["vocabulary"])


def note_of(out: Path) -> Note:
    """The note of a run's checkpoint."""
    note = read_note(out)
    assert note is not None
    return note


def rows_of(out: Path) -> list[dict[str, Any]]:
    """The rows of a run, `seconds` aside: two equal runs never take the same time."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        assert row.pop("seconds") >= 0
    return rows
