"""Fixtures of small speech runs, and a file that must never appear."""

from collections.abc import Callable
from pathlib import Path

import pytest

from normrnn.recipes.speech import SpeechConfig
from tests.commands.conftest import cli
from tests.tiny_runs import run_tiny
from tests.tiny_speech import speech_dir, tiny_speech

__all__ = ["cli", "speech_dir", "tiny_speech"]

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def speech_run(tiny_speech: SpeechConfig, tmp_path: Path) -> Path:
    """A finished run on `speech_dir`."""
    run_tiny(tiny_speech, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """Made by whatever a hostile file gets executed."""
    return tmp_path / "canary"
