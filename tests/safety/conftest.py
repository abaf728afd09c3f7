"""Copies of small trained runs, and a file that must never appear."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kaldiio
import numpy as np
import pytest

from normrnn.engine.loop import Interrupted
from normrnn.speech.archive import read_table
from tests.commands.conftest import cli
from tests.tiny_runs import run_tiny, tiny_config, write_texts
from tests.tiny_speech import speech_dir, tiny_speech, tiny_speech_config, write_speech

__all__ = ["cli", "speech_dir", "tiny_speech"]

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with runs, and the data of `text_dir` and `speech_dir`."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").mkdir()
    write_texts(folder / "text")
    write_speech(folder / "speech")
    text = tiny_config(folder / "text")
    run_tiny(text, folder / "run")
    run_tiny(tiny_speech_config(folder / "speech"), folder / "speech-run")
    run_tiny(replace(text, norm="frame"), folder / "whole")
    with pytest.raises(Interrupted):
        run_tiny(replace(text, norm="frame"), folder / "stopped", stop_at=45)
    return folder


def _copied(name: str) -> Any:
    """A fixture: a copy of this run for one test."""

    @pytest.fixture
    def copied(trained: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(trained / name, tmp_path / name))

    return copied


run = _copied("run")
"""A finished run of `tiny`."""
whole, stopped = _copied("whole"), _copied("stopped")
"""A finished run of `tiny_frame`, and the same in the middle."""
speech_run = _copied("speech-run")
"""A finished run of `tiny_speech`."""


def arguments(command: str, data: Path, run: Path, tmp_path: Path) -> list[str]:
    """A call that reads features of `data`."""
    if command == "train":
        settings = ["--epochs", "1", "--model.hidden", "5", "--train.batch", "4"]
        out = ["--out", str(tmp_path / "new"), "--norm", "sequence"]
        return ["train", "librispeech-mini", "--data", str(data), *out, *settings]
    if command == "evaluate":
        return ["evaluate", str(run), "--data", str(data)]
    if command == "posteriors":
        return ["posteriors", str(run), "--data", str(data / "dev"), "--out", str(tmp_path / "p")]
    ali = tmp_path / "ali"
    ali.mkdir(exist_ok=True)
    keys = [*read_table(data / "dev" / "feats.scp")]
    labels = {key: np.zeros(20, dtype=np.int32) for key in keys}
    kaldiio.save_ark(str(ali / "pdf.ark"), labels)
    out = ["--out", str(tmp_path / "out"), "--processes", "1", "--classes", "7"]
    return ["prepare", "kaldi", "--data", str(data / "dev"), "--ali", str(ali), *out]


@pytest.fixture
def speech(cli: Cli, speech_run: Path, speech_dir: Path, tmp_path: Path) -> Cli:
    """Call a command that reads features of `speech_dir`."""
    return lambda command, *more: cli(*arguments(command, speech_dir, speech_run, tmp_path), *more)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """Made by whatever a hostile file gets executed."""
    return tmp_path / "canary"
