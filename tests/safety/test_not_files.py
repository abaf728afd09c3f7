"""What lies where a file should be and is none: nobody waits for it, nobody fills the memory."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from normrnn.files import is_held
from tests.safety.conftest import Cli


class Hung(BaseException):
    """Raised in the middle of whatever is waited for."""


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    def hung(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def replaced(path: Path, what: str) -> None:
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("what", ["pipe", "endless"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "metrics.jsonl", "checkpoint.pt", "environment.json",
     "model.safetensors", ".lock"],
)  # fmt: skip
def test_in_a_run_directory(
    name: str, what: str, cli: Cli, run: Path, text_dir: Path, tmp_path: Path
) -> None:
    replaced(run / name, what)
    calls = (
        ["evaluate", run],
        ["report", run, "--out", tmp_path / "r.html"],
        ["train", "ptb-small", "--data", text_dir, "--out", run],
    )
    for call in calls:
        _, _, err = cli(*call)
        assert "unexpected error" not in err
    assert is_held(run / ".lock") is False


@pytest.mark.parametrize("what", ["pipe", "endless"])
def test_in_a_directory_of_texts(what: str, cli: Cli, run: Path, text_dir: Path) -> None:
    replaced(text_dir / "valid.txt", what)
    code, _, err = cli("evaluate", run, "--data", text_dir)
    assert (code, "has no valid.txt" in err) == (1, True)
    code, _, err = cli("score", run, text_dir / "valid.txt")
    assert (code, "not a regular file" in err) == (1, True)


@pytest.mark.parametrize("name", ["space", "listed", "lexicon", "report"])
def test_named_on_the_command_line(
    name: str, cli: Cli, run: Path, text_dir: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe.html")
    prepare = ["prepare", "librispeech", tmp_path, "--out", tmp_path / "o"]
    calls = {
        "space": ["search", "ptb-small", "--data", text_dir, "--space"],
        "listed": [*prepare, "--dev-speakers"],
        "lexicon": [*prepare, "--lexicon"],
        "report": ["report", run, "--out"],
    }
    chapter = tmp_path / "1" / "2"
    chapter.mkdir(parents=True)
    (chapter / "1-2.trans.txt").write_text("1-2-3 WORDS\n")
    code, _, err = cli(*calls[name], tmp_path / "pipe.html")
    assert code in (1, 2)
    assert "not a regular file" in err
