"""`normrnn search` as a user meets it, with real runs."""

import json
import math
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from normrnn import verdict
from normrnn.config.jsonio import flat, to_dict
from normrnn.extras import install_command
from normrnn.recipes import ptb_char, recipe
from normrnn.runs.records import read_rows
from normrnn.text.config import EvaluationConfig
from tests.commands.conftest import Cli, cli

__all__ = ["cli"]

Flags = Callable[..., list[str]]
SPACE = {
    "optimizer.lr": {"low": 1e-3, "high": 0.1, "log": True},
    "optimizer.momentum": [0.5, 0.9],
    "train.batch": [8, 16],
}


@pytest.fixture
def flags(text_dir: Path, tmp_path: Path) -> Flags:
    """A search with two variants of 31 or 62 updates each."""
    config = ptb_char()
    config = replace(
        config,
        data=str(text_dir),
        epochs=1,
        threads=1,
        model=replace(config.model, hidden=8, embedding=6, layers=1, time_steps=12),
        train=replace(config.train, steps=12, epoch_tokens=6000, log_every=2, checkpoint_every=5),
        evaluation=EvaluationConfig(train_tokens=0, recalibrate_windows=2, tokens=200),
    )
    usual, tiny = flat(to_dict(recipe("ptb-char"))), flat(to_dict(config))
    fixed = {name: tiny[name] for name in tiny if tiny[name] != usual[name]}
    space = tmp_path / "space.json"
    space.write_text(json.dumps(SPACE))
    fixed |= {"space": space, "out": tmp_path / "out"}

    def build(**more: object) -> list[str]:
        pairs = (fixed | more).items()
        words = ((f"--{name.replace('_', '-')}", str(value)) for name, value in pairs)
        return ["search", "ptb-char", *(word for pair in words for word in pair)]

    return build


def table(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]


def test_a_study_and_its_continuation(
    cli: Cli, flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    code, said, err = cli(*flags(trials=2, workers=2, confirm=2))
    assert code == 0, err
    assert "2 of 2 trials are done" in said
    confirmed = sorted((out / "confirm").iterdir())
    assert [run.name for run in confirmed] == ["hidden-2", "hidden-3", "none-2", "none-3"]
    (found,) = verdict(confirmed).variants.values()
    assert found.quality is not None
    assert found.quality.interval is not None
    assert (found.quality.seeds, found.quality.paired) == (2, True)
    assert found.quality.answer in said
    for norm in ("none", "hidden"):
        best = min(table(out), key=lambda row: row["arms"][norm]["loss"])
        config = json.loads((out / "confirm" / f"{norm}-2" / "config.json").read_text())
        assert config["optimizer"]["lr"] == best["settings"]["optimizer.lr"]
    rows = table(out)
    assert [row["trial"] for row in rows] == [0, 1]
    assert {norm for row in rows for norm in row["arms"]} == {"none", "hidden"}
    for row in rows:
        assert row["value"] == min(arm["loss"] for arm in row["arms"].values())
        assert row["arms"]["none"]["updates"] == 6000 // (12 * row["settings"]["train.batch"])
    report = (out / "report.html").read_text()
    for words in ("normrnn search ptb-char", "2 settings, 4 runs", "space.optimizer.lr.low"):
        assert words in report
    assert str(tmp_path) not in report
    assert str(tmp_path) not in (out / "study.json").read_text()

    monkeypatch.setitem(sys.modules, "matplotlib", None)  # of the extra [report], not [search]
    before = {p: p.stat().st_mtime_ns for p in (out / "trials").rglob("metrics.jsonl")}
    code, said, err = cli(*flags(trials=3))
    assert code == 0, err
    assert install_command("report") in said
    assert "<figure" not in (out / "report.html").read_text()
    strip = [{**row, "sha256": ""} for row in (*rows, *table(out))]
    assert strip[:2] == strip[2:4]
    assert len(table(out)) == 3
    kept = (out / "trials.jsonl").read_bytes()
    for change, word in (
        ({"norms": "none,frame"}, "norms"),
        ({"seed": 2}, "seed was 1, is now 2"),
        ({"evaluation.tokens": 100}, "evaluation.tokens was 200, is now 100"),
    ):
        code, _, err = cli(*flags(trials=3, **change))
        assert (code, word in err) == (2, True), err
    assert cli(*flags(trials=1))[0] == 0  # a study is never made smaller
    assert (out / "trials.jsonl").read_bytes() == kept
    assert {p: p.stat().st_mtime_ns for p in before} == before
    (out / "trials.jsonl").write_text("{")
    code, _, err = cli(*flags(trials=3))
    assert (code, "damaged" in err) == (1, True)


def test_two_commands_share_a_study_and_one_is_killed(flags: Flags, tmp_path: Path) -> None:
    """The other one resumes its runs from their checkpoints."""
    out, words = tmp_path / "out", flags(trials=3, workers=2)
    command = [sys.executable, "-m", "normrnn.cli", *words]
    victim = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (out / "trials" / "0000" / "none" / "checkpoint.pt").exists():
        assert victim.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    other = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    assert other.wait(300) == 0
    assert len({json.dumps(row["settings"]) for row in table(out)}) == 3
    for run in (out / "trials").glob("*/*"):
        updates = Counter(r["updates"] for r in read_rows(run) if r["split"] == "train")
        assert set(updates.values()) == {1}


@pytest.mark.slow
def test_ctrl_c_stops_a_study_which_resumes(cli: Cli, flags: Flags, tmp_path: Path) -> None:
    """What is done is written; the same command resumes the run that was stopped."""
    out, words = tmp_path / "out", flags(trials=3)
    command = [sys.executable, "-m", "normrnn.cli", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    run = out / "trials" / "0002" / "none"
    while not (run / "checkpoint.pt").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert [row["trial"] for row in table(out)] == [0, 1]
    assert "2 of 3 trials are done" in said
    assert "2 settings" in (out / "report.html").read_text()
    begun = read_rows(run)
    assert cli(*words)[0] == 0
    assert [row["trial"] for row in table(out)] == [0, 1, 2]
    assert begun
    assert read_rows(run)[: len(begun)] == begun


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ({"trials": 0}, 2, "--trials must be"),
        ({"confirm": 1}, 2, "--confirm needs at least 2 seeds"),
        ({"norms": "none,batch"}, 2, "--norms has 'batch'"),
        ({"sampler": "bruteforce"}, 2, "tries every value: give optimizer.lr as a list"),
        ({"data": "/nowhere/at/all"}, 1, "does not exist"),
    ],
)
def test_wrong_calls(
    cli: Cli, flags: Flags, tmp_path: Path, more: dict[str, str], code: int, said: str
) -> None:
    got, _, err = cli(*flags(**more))
    assert (got, err.count("\n"), said in err) == (code, 1, True), err
    assert not (tmp_path / "out").exists()


def test_diverged_and_failed_settings_stop_no_other(cli: Cli, flags: Flags, tmp_path: Path) -> None:
    space = tmp_path / "other.json"
    space.write_text('{"optimizer.lr": [0.05, 1e38], "train.batch": [8, 100000]}')
    code, said, err = cli(*flags(space=space, sampler="bruteforce", norms="none", workers=2))
    assert (code, "100000" in err) == (1, True), err
    assert "2 of 4 trials are done" in said
    assert "2 settings" in (tmp_path / "out" / "report.html").read_text()
    arms = [row["arms"]["none"] for row in table(tmp_path / "out")]
    assert [arm["diverged"] for arm in arms] == [False, True]
    assert math.isfinite(arms[0]["loss"])
    assert "at update" in arms[1]["reason"]
