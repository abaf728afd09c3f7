"""Copies of small trained runs, and a file that must never appear."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from normrnn.engine.interrupt import Interrupted
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


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A finished run of `tiny`."""
    return Path(shutil.copytree(trained / "run", tmp_path / "run"))


@pytest.fixture
def whole(trained: Path, tmp_path: Path) -> Path:
    """A finished run of `tiny_frame`."""
    return Path(shutil.copytree(trained / "whole", tmp_path / "whole"))


@pytest.fixture
def stopped(trained: Path, tmp_path: Path) -> Path:
    """The same in the middle, with two checkpoints."""
    return Path(shutil.copytree(trained / "stopped", tmp_path / "stopped"))


@pytest.fixture
def speech_run(trained: Path, tmp_path: Path) -> Path:
    """A finished run of `tiny_speech`."""
    return Path(shutil.copytree(trained / "speech-run", tmp_path / "run"))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """Made by whatever a hostile file gets executed."""
    return tmp_path / "canary"
