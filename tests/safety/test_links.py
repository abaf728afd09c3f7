"""Symbolic links in a directory that is written to: nothing they point to is touched."""

import os
from pathlib import Path

import pytest

from normrnn.files import write_whole
from normrnn.speech.config import SpeechConfig
from tests.safety.conftest import Cli
from tests.tiny_runs import run_tiny


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text("precious")
    return path


def test_files_of_a_run(tiny_speech: SpeechConfig, precious: Path, tmp_path: Path) -> None:
    """Also what killed writers left, which is removed."""
    out = tmp_path / "run"
    out.mkdir()
    names = ("checkpoint.pt", "metrics.csv", "evaluation.json")
    left = [out / f".{name}.0123456789abcdef.tmp" for name in names]
    other = out / ".evaluation.json.00112233aabbccdd.tmp"  # another process may be writing it now
    for path in (*left, other, out / ".config.json.tmp", out / "evaluation.json"):
        path.symlink_to(precious)
    os.utime(left[-1], (0, 0), follow_symlinks=False)  # but nobody still writes this one
    run_tiny(tiny_speech, out)
    write_whole(out / "evaluation.json", b"{}")
    assert not (out / "evaluation.json").is_symlink()
    assert not any(path.is_symlink() for path in left)
    assert other.is_symlink()
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
def test_a_link_that_would_be_written_through_is_refused(
    name: str, speech: Cli, speech_run: Path, precious: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new"
    out.mkdir()
    (out / "config.json").write_bytes((speech_run / "config.json").read_bytes())
    (out / name).symlink_to(precious)
    code, _, err = speech("train")
    assert code != 0
    assert err.startswith("normrnn: ")
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("name", [".p.ark.tmp", ".p.scp.tmp", "p.ark", "p.scp"])
def test_posteriors(name: str, speech: Cli, precious: Path, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to(precious)
    code, _, err = speech("posteriors")
    assert code == 0, err
    assert precious.read_text() == "precious"
    assert not (tmp_path / "p.ark").is_symlink()


def test_the_archives_of_a_preparation(speech: Cli, precious: Path, tmp_path: Path) -> None:
    code, _, err = speech("prepare")  # begins, and finds nothing it can use: 20 labels for each
    assert code == 1, err
    (tmp_path / "out" / "train" / "feats.ark").unlink()
    (tmp_path / "out" / "train" / "feats.ark").symlink_to(precious)
    code, _, err = speech("prepare")
    assert code == 1
    assert "normrnn: " in err
    assert precious.read_text() == "precious"


def test_a_comparison(cli: Cli, text_dir: Path, precious: Path, tmp_path: Path) -> None:
    out, name = tmp_path / "out", "none-1/log.txt"
    (out / name).parent.mkdir(parents=True)
    (out / name).symlink_to(precious)
    settings = ["--epochs", "1", "--model.hidden", "4", "--train.batch", "8", "--train.steps", "5"]
    call = ["compare", "ptb-small", "--data", text_dir, "--norms", "none", "--out", out]
    code, _, err = cli(*call, *settings)
    assert precious.read_text() == "precious"
    assert code == 1
    assert err.startswith("normrnn: ")


def test_tensorboard_in_another_place(speech: Cli, tmp_path: Path) -> None:
    """What is in there is removed when it is written anew."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "events.out.tfevents.1").write_text("precious")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "tensorboard").symlink_to(other)
    code, _, err = speech("train", "--tensorboard")
    assert code == 1
    assert "link: not writing through it" in err
    assert (other / "events.out.tfevents.1").read_text() == "precious"


@pytest.mark.parametrize("command", ["train", "evaluate", "posteriors", "prepare"])
def test_a_link_to_itself(command: str, speech: Cli, speech_dir: Path) -> None:
    for split in ("train", "dev"):
        archive = speech_dir / split / "feats.ark"
        archive.unlink()
        archive.symlink_to(archive)
    code, _, err = speech(command)
    assert code == 1
    sentences = [line for line in err.splitlines() if line.startswith("normrnn: ")]
    assert len(sentences) == 1, err
    if command != "prepare":  # which writes down why, utterance by utterance
        assert "feats.ark" in sentences[0]
    assert "unexpected error" not in sentences[0]
