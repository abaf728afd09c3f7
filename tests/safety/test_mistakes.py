"""Every mistake is one sentence: no stack trace, no crash, nothing half done."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from normrnn.cli import guarded
from tests.safety.conftest import Cli


def sentence(err: str) -> str:
    """What was said: one line, by this program."""
    (line,) = err.strip().splitlines()
    assert line.startswith("normrnn: ")
    return line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--threads", "100000"], "threads must lie between 0 and"),
        (["--device", "meta"], "no device 'meta'"),
        (["--model.hidden", "1000000"], "the network is too large"),
        (["--model.hidden", "2147483647"], "the network is too large"),
        (["--model.hidden", "1" + "0" * 20], "model.hidden must be at most 2,147,483,647"),
        (["--norm", "frame", "--model.time-steps", "999999999"], "the network is too large"),
        (["--model.init", "1e300"], "model.init"),
        (["--optimizer.lr", "1e300"], "optimizer.lr"),
    ],
)
def test_values_out_of_range(
    flags: list[str], said: str, cli: Cli, text_dir: Path, tmp_path: Path
) -> None:
    code, _, err = cli("train", "ptb-small", "--data", text_dir, "--out", tmp_path / "o", *flags)
    assert code == 2
    assert said in sentence(err)
    assert not (tmp_path / "o" / "checkpoint.pt").exists()


def test_an_empty_name(
    cli: Cli, text_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (["--out", ""], ["--out="]):
        code, _, err = cli("train", "ptb-small", "--data", text_dir, *out)
        assert (code, sentence(err)) == (2, "normrnn: --out needs a name")
    assert not any((tmp_path / "here").iterdir())


def test_a_home_directory_that_the_shell_did_not_expand(
    cli: Cli, text_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    flags = ["--epochs", "1", "--model.hidden", "4", "--train.batch", "8", "--train.steps", "5"]
    code, out, err = cli("train", "ptb-small", "--data", text_dir, "--out=~/r", *flags)
    assert code == 0, err
    assert (tmp_path / "home" / "r" / "config.json").exists()
    assert not (tmp_path / "~").exists()
    assert out.splitlines()[0] == f"ptb-small, norm none, seed 1: {tmp_path}/home/r"
    assert out.splitlines()[-1].endswith("is finished: 1 epoch.")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 100_000, "is damaged: not JSON"),
        ("[1]", "is damaged: not a JSON dict"),
        ('"x"', "is damaged: not a JSON dict"),
        ({"seed": 10**400}, "config field seed is a number of 401 digits"),
        ({"data": "\ud800"}, "config field data"),
        ({"epochs": {"a": 1}}, "config field epochs is {'a': 1}"),
        ({"model": 3}, "model is 3"),
        ({"recipe": ["x" * 1000]}, "that is not known here"),
    ],
)
@pytest.mark.parametrize("command", ["train", "evaluate", "report"])
def test_strange_configs(
    command: str,
    content: str | dict,
    said: str,
    cli: Cli,
    run: Path,
    text_dir: Path,
    tmp_path: Path,
) -> None:
    if isinstance(content, dict):
        content = json.dumps(json.loads((run / "config.json").read_text()) | content)
    (run / "config.json").write_text(content)
    calls = {
        "train": ["train", "ptb-small", "--data", text_dir, "--out", run],
        "evaluate": ["evaluate", run],
        "report": ["report", run, "--out", tmp_path / "r.html"],
    }
    code, _, err = cli(*calls[command])
    assert "unexpected error" not in err
    if command == "report":  # which shows what there is
        assert (code == 0) == (tmp_path / "r.html").exists()
    else:
        assert code != 0
        assert said in sentence(err)
        assert len(sentence(err)) < 500


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"--prior-floor": "nan"}, 2, "--prior-floor must be positive and finite"),
        ({"--prior-floor": "0"}, 2, "--prior-floor must be positive and finite"),
        ({"--priors": None, "--prior-floor": "30"}, 2, "--prior-floor needs --priors"),
        ({"--out": "."}, 2, "is a directory"),
        ({"--out": "/"}, 2, "is a directory"),
        ({"--data": ""}, 1, "feats.scp"),
    ],
)
def test_posteriors(
    changes: dict[str, str | None],
    code: int,
    said: str,
    cli: Cli,
    speech_run: Path,
    speech_dir: Path,
    tmp_path: Path,
) -> None:
    options = {"--data": "dev", "--out": tmp_path / "p", "--priors": True, **changes}
    call: list[Any] = ["posteriors", speech_run, "--data", speech_dir / str(options.pop("--data"))]
    for name, value in options.items():
        call += [] if value is None else [name] if value is True else [name, value]
    found, _, err = cli(*call)
    assert (found, said in sentence(err)) == (code, True), err
    assert not (tmp_path / "p.ark").exists()


def test_utf_16_is_named(cli: Cli, run: Path, tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes("some words\n".encode("utf-16"))
    code, _, err = cli("score", run, tmp_path / "odd")
    assert code == 1
    assert "UTF-16" in sentence(err)


@pytest.mark.slow
def test_names_that_are_not_text(run: Path, text_dir: Path, tmp_path: Path) -> None:
    """As processes: the streams of this one are pytest's."""
    odd = os.fsencode(tmp_path) + b"/\xff\xfe"
    Path(os.fsdecode(odd)).mkdir()
    for file in text_dir.iterdir():
        os.link(file, odd + b"/" + os.fsencode(file.name))
    flags = ["--epochs", "1", "--model.hidden", "4", "--train.batch", "8", "--train.steps", "5"]
    train: list[Any] = ["train", "ptb-small", "--data", odd, "--out", odd + b"/run", *flags]
    for call in (train, ["score", run, odd + b"/valid.txt"]):
        done = subprocess.run([sys.executable, "-m", "normrnn.cli", *call], capture_output=True)
        assert done.returncode == 0, done.stderr
    assert b"perplexity" in done.stdout


def test_a_closed_pipe(run: Path, text_dir: Path) -> None:
    command = f"{sys.executable} -m normrnn.cli score {run} {text_dir / 'train.txt'} --lines"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -n 1"], capture_output=True, text=True
    )
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


def test_unexpected_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace is in a file that only the user can read: it holds the arguments."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fails(_: list[str]) -> int:
        raise ZeroDivisionError("who would have thought")

    assert guarded(fails, ["search", "--storage", "postgresql://me:secret@here/db"]) == 1
    said = sentence(capsys.readouterr().err)
    assert "(ZeroDivisionError: who would have thought)" in said
    (file,) = tmp_path.iterdir()
    assert said.endswith(str(file))
    assert file.stat().st_mode & 0o777 == 0o600
    assert "in fails" in file.read_text()
    assert "secret" in file.read_text()


def test_a_file_cannot_control_the_terminal(cli: Cli, run: Path, caplog: Any) -> None:
    """By what it holds, in a sentence or in a word on the way."""
    config = json.loads((run / "config.json").read_text())
    for name in ("recipe", "data"):
        strange = json.dumps(config | {name: "a\x1b]0;b\x07\ud800"})
        (run / "config.json").write_text(strange)
        _, out, err = cli("report", run, "--out", run / "r.html")
        code, _, more = cli("evaluate", run)
        assert code
        told = out + err + more + caplog.text
        assert not {c for c in told if not c.isprintable()} - {"\n", "\t"}
        assert "a\\x1b]0;b\\x07" in told
