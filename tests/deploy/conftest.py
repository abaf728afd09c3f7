"""Small finished and evaluated runs on text and speech, made once for all tests here."""

from dataclasses import replace
from pathlib import Path

import pytest

from normrnn.cli import main
from tests.commands.conftest import cli
from tests.tiny_runs import run_tiny, tiny_config, write_texts
from tests.tiny_speech import tiny_speech_config, write_speech

__all__ = ["cli"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with runs on text and on speech, and their data."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text-data").mkdir()
    write_texts(folder / "text-data")
    write_speech(folder / "speech-data")
    text = tiny_config(folder / "text-data")
    text = replace(text, norm="frame", epochs=2, model=replace(text.model, hidden=6))
    run_tiny(text, folder / "text")
    run_tiny(tiny_speech_config(folder / "speech-data"), folder / "speech")
    for kind in ("text", "speech"):
        with pytest.raises(SystemExit, match="0"):
            main(["evaluate", str(folder / kind)])
    return folder
