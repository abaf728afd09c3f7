"""Copies of small trained runs, and a file that must never appear."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normrnn.engine.loop import Interrupted
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


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """Made by whatever a hostile file gets executed."""
    return tmp_path / "canary"
