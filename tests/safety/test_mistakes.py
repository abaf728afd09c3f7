"""Every mistake is one sentence: no stack trace, no crash, nothing half done."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from normrnn import crash
from normrnn.cli import guarded
from normrnn.engine.display import PlainDisplay, Status, describe
from normrnn.speech.config import FRAMES
from normrnn.text.config import CHARACTERS, WORDS, LanguageConfig
from tests.safety.conftest import Cli
from tests.tiny_runs import run_tiny, text_dir, tiny, tiny_frame

__all__ = ["text_dir", "tiny", "tiny_frame"]


@pytest.fixture
def run(tiny: LanguageConfig, tmp_path: Path) -> Path:
    run_tiny(tiny, tmp_path / "run")
    return tmp_path / "run"


def sentence(err: str) -> str:
    """What was said: one line, by this program."""
    (line,) = err.strip().splitlines()
    assert line.startswith("normrnn: ")
    return line


def real(*arguments: str | bytes | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "normrnn.cli", *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        **options,
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--threads", "100000"], "threads must lie between 0 and"),
        (["--device", "meta"], "no device 'meta'"),
        (["--device", "mps"], "no device 'mps'"),
        (["--model.hidden", "1000000"], "the network is too large: 16,000,"),
        (["--model.hidden", "2147483647"], "the network is too large"),
        (["--model.hidden", "1" + "0" * 20], "model.hidden must be at most 2,147,483,647"),
        (["--model.layers", "1000000"], "model.layers must lie in [1, 1000]"),
        (
            ["--norm", "frame", "--model.time-steps", "99999999999"],
            "model.time_steps must be at most",
        ),
        (["--norm", "frame", "--model.time-steps", "999999999"], "the network is too large"),
        (["--seed", "x"], "'x' is no whole number"),
        (["--optimizer.lr", "fast"], "'fast' is no number"),
    ],
)
def test_values_beyond_reason(
    flags: list[str], said: str, cli: Cli, text_dir: Path, tmp_path: Path
) -> None:
    code, _, err = cli("train", "ptb-small", "--data", text_dir, "--out", tmp_path / "o", *flags)
    assert code == 2
    assert said in sentence(err)
    assert not (tmp_path / "o" / "checkpoint.pt").exists()


@pytest.mark.parametrize("command", ["evaluate", "posteriors"])
def test_too_many_threads_elsewhere(command: str, cli: Cli, run: Path, tmp_path: Path) -> None:
    more = ["--data", tmp_path, "--out", tmp_path / "p"] if command == "posteriors" else []
    code, _, err = cli(command, run, *more, "--threads", "100000")
    assert code == 2
    assert "threads must lie between" in sentence(err)


@pytest.mark.parametrize("arguments", [["--out", ""], ["--out="]])
def test_an_empty_name(
    arguments: list[str], cli: Cli, text_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, _, err = cli("train", "ptb-small", "--data", text_dir, *arguments)
    assert (code, sentence(err)) == (2, "normrnn: --out needs a name")
    assert not any((tmp_path / "here").iterdir())


def test_a_home_that_the_shell_left_alone(
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
        ('{"a":' * 100_000, "is damaged: not JSON"),
        ({"seed": 10**400}, "config field seed is a number of 401 digits"),
        ({"optimizer": {"lr": 10**400}}, "config field optimizer.lr is a number of 401 digits"),
        ({"data": "\ud800"}, "config field data"),
        ({"norm": "\ud800"}, "config field norm "),
        ({"epochs": {"a": 1}}, "config field epochs should be int, not {'a': 1}"),
        ({"model": 3}, "model should be an object, not 3"),
        ({"recipe": ["x" * 1000]}, "that is not known here"),
        ({"seed": 1e999}, "config field seed should be int, not inf"),
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


@pytest.mark.parametrize("floor", ["inf", "nan", "0", "-1"])
def test_prior_floor(
    floor: str, cli: Cli, speech_run: Path, speech_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p"
    call = ["posteriors", speech_run, "--data", speech_dir / "dev", "--out", out, "--priors"]
    code, _, err = cli(*call, "--prior-floor", floor)
    assert code == 2
    assert "--prior-floor must be positive and finite" in sentence(err)
    assert not out.with_suffix(".ark").exists()


def test_posteriors_without_a_name_or_with_a_floor_for_nothing(
    cli: Cli, speech_run: Path, speech_dir: Path
) -> None:
    call = ["posteriors", speech_run, "--data", speech_dir / "dev", "--out"]
    for out in (".", "..", "/"):
        code, _, err = cli(*call, out)
        assert code == 2
        assert f"--out {out} is a directory: the archive needs a name" in sentence(err)
    code, _, err = cli(*call, "post", "--prior-floor", "30")
    assert (code, sentence(err)) == (2, "normrnn: --prior-floor needs --priors")


def test_posteriors_of_a_whole_prepared_directory(
    cli: Cli, speech_run: Path, speech_dir: Path, tmp_path: Path
) -> None:
    code, _, err = cli("posteriors", speech_run, "--data", speech_dir, "--out", tmp_path / "p")
    assert code == 1
    assert f"its parts have one: {speech_dir}/train or {speech_dir}/dev" in sentence(err)


def test_gradients_of_nothing(cli: Cli) -> None:
    code, _, err = cli("gradients", "nosuch")
    assert code == 2
    assert "nosuch is neither a run directory nor a recipe" in sentence(err)


def test_utf_16_is_called_what_it_is(cli: Cli, run: Path, tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes("some words\n".encode("utf-16"))
    code, _, err = cli("score", run, tmp_path / "odd")
    assert code == 1
    assert "is UTF-16 text, not UTF-8" in sentence(err)


def test_changed_data_is_called_so(cli: Cli, run: Path, text_dir: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    with (text_dir / "train.txt").open("a") as file:
        file.write("w1 w2\n")
    flags = ["--epochs", "3"]
    for part in ("model", "optimizer", "train", "evaluation"):
        for name, value in config[part].items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{part}.{flag}" if value else f"--{part}.no-{flag}")
            else:
                flags += [f"--{part}.{flag}", str(value)]
    code, _, err = cli("train", "ptb-small", "--data", text_dir, "--out", run, *flags)
    assert code == 2
    assert f"{run} was begun on other data than {text_dir} is now" in sentence(err)


@pytest.mark.slow
def test_names_that_are_no_text(run: Path, text_dir: Path, tmp_path: Path) -> None:
    """As processes: the streams of this one are pytest's."""
    odd = os.fsencode(tmp_path) + b"/\xff\xfe"
    Path(os.fsdecode(odd)).mkdir()
    for file in text_dir.iterdir():
        os.link(file, odd + b"/" + os.fsencode(file.name))
    flags = ["--epochs", "1", "--model.hidden", "4", "--train.batch", "8", "--train.steps", "5"]
    done = real("train", "ptb-small", "--data", odd, "--out", odd + b"/run", *flags)
    assert done.returncode == 0, done.stderr
    done = real("score", run, odd + b"/valid.txt")
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout


def test_a_reader_that_has_seen_enough(run: Path, text_dir: Path) -> None:
    command = f"{sys.executable} -m normrnn.cli score {run} {text_dir / 'train.txt'} --lines"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -n 1"], capture_output=True, text=True
    )
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("where", ["run", "temporary"])
def test_what_nobody_foresaw(
    where: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fails(_: list[str]) -> int:
        raise ZeroDivisionError("who would have thought")

    assert guarded(fails, ["evaluate", str(run if where == "run" else "nothing")]) == 1
    said = sentence(capsys.readouterr().err)
    assert "(ZeroDivisionError: who would have thought)" in said
    file = Path(said.rpartition(" in ")[2])
    assert file.parent == (run if where == "run" else tmp_path)
    assert "in fails" in file.read_text()


def test_a_file_cannot_steer_the_terminal(cli: Cli, run: Path, caplog: Any) -> None:
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
    assert "is now a\\x1b]0;b\\x07" in caplog.text


def test_not_enough_memory_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(_: list[str]) -> int:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ... bytes")

    assert guarded(fails, []) == 1
    assert "out of memory" in sentence(capsys.readouterr().err)


def test_lines_fit_a_terminal_of_80_columns() -> None:
    row = {"epoch": 55, "updates": 45_650, "split": "valid", "statistics": "recalibrated"}
    assert len(describe({**row, "loss": 4.6789}, 55, CHARACTERS)) <= 80


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"lr": 1.0}, "  2:13:20 left"),
        ({"lr": 0.5**11}, "  lr 0.000488"),
        ({"lr": 0.5**11, "fer": 0.1234}, "  FER 12.34%  lr 0.000488"),
    ],
)
def test_train_rows_fit_too(
    more: dict, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, *[9.0] * 9])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    display = PlainDisplay(55, FRAMES if "fer" in more else WORDS)
    for updates in (1, 10):
        status = {"updates": updates, "index": updates, "seconds": float(updates), "count": 90}
        display.update(Status(epoch=54, epoch_updates=4005, loss=1.0, lr=1.0, **status))
    display.row({"epoch": 54, "updates": 45_650, "split": "train", "loss": 4.6789, **more})
    (line,) = capsys.readouterr().out.splitlines()
    assert len(line) <= 80
    assert said in line


def test_time_left_counts_validations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten updates of a second each, and then a validation of ninety."""
    clock = iter([0.0, 9.0, 99.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    display = PlainDisplay(2, WORDS)
    for updates in (1, 10):
        status = {"updates": updates, "index": updates, "seconds": float(updates), "count": 90}
        display.update(Status(epoch=1, epoch_updates=10, loss=1.0, lr=1.0, **status))
    assert display.speed() == "10 tokens/s  0:00:10 left"
    assert display.speed() == "10 tokens/s  0:01:50 left"


def test_only_the_user_can_read_what_a_crash_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the arguments."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    crash.report(ValueError("five"), ["search", "--storage", "postgresql://me:secret@here/db"])
    (left,) = tmp_path.iterdir()
    assert left.stat().st_mode & 0o777 == 0o600
    assert "secret" in left.read_text()
