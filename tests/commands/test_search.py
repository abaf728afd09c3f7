"""`normrnn search` as a user meets it."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from normrnn import verdict
from normrnn.extras import install_command
from tests.commands.conftest import Cli
from tests.search.conftest import flags, tiny_plan

__all__ = ["flags", "tiny_plan"]

Flags = Callable[..., list[str]]


def test_a_study_and_its_continuation(
    cli: Cli, flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    code, said, err = cli(*flags(trials=2, workers=2, out=out))
    assert code == 0, err
    assert "2/2  trial" in said
    assert "2 of 2 trials are done" in said
    first = (out / "trials.jsonl").read_text()
    rows = [json.loads(line) for line in first.splitlines()]
    assert [row["trial"] for row in rows] == [0, 1]
    assert {norm for row in rows for norm in row["arms"]} == {"none", "hidden"}
    assert (out / "study.db").exists()
    report = (out / "report.html").read_text()
    assert "<h1>normrnn search ptb-char</h1>" in report
    assert "2 settings, 4 runs" in report
    assert "0.001 to 0.1 log-uniform" in report
    assert "normrnn train ptb-char --norm hidden" in report  # a run of the best trial
    assert str(tmp_path) not in report
    assert str(tmp_path) not in (out / "study.json").read_text()

    monkeypatch.setitem(sys.modules, "matplotlib", None)  # of the extra [report], not [search]
    code, said, err = cli(*flags(trials=3, workers=1, out=out))
    assert code == 0, err
    assert install_command("report") in said
    assert "<figure" not in (out / "report.html").read_text()
    lines = (out / "trials.jsonl").read_text().splitlines()
    kept = [{**json.loads(line), "sha256": None} for line in lines[:2]]
    assert kept == [{**row, "sha256": None} for row in rows]  # but for what seals the whole file
    assert len(lines) == 3

    code, _, err = cli(*flags(trials=1, out=out, study="another"))
    assert code == 1
    assert f"{out} holds the results of the study 'ptb-char' of ptb-char: use another --out" in err
    assert (out / "trials.jsonl").read_text().splitlines() == lines

    elsewhere = f"sqlite:///{tmp_path / 'another.db'}"
    code, _, err = cli(*flags(trials=3, out=out, norms="none,frame", storage=elsewhere))
    assert code == 1
    assert f"{out} holds results of other settings (norms was ['none', 'hidden'], is now" in err
    code, _, err = cli(*flags(trials=2, out=out))
    assert code == 1
    assert f"{out} holds 3 trials, more than --trials 2: use another --out" in err
    assert (out / "trials.jsonl").read_text().splitlines() == lines
    assert not (tmp_path / "another.db").exists()

    before = {p: p.stat().st_mtime_ns for p in (out / "trials").rglob("metrics.jsonl")}
    code, _, err = cli(*flags(trials=3, out=out), "--evaluation.tokens", "100")
    assert code == 1
    assert "evaluation.tokens was 200, is now 100" in err
    assert {p: p.stat().st_mtime_ns for p in (out / "trials").rglob("metrics.jsonl")} == before


@pytest.mark.slow
def test_ctrl_c_stops_a_study_and_writes_what_is_done(flags: Flags, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "normrnn.cli", *flags(trials=40, out=out)],
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith("1/40  trial")
    process.send_signal(signal.SIGINT)
    said = process.stdout.read()
    assert process.wait() == 130, said
    process.stdout.close()
    rows = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    assert 0 < len(rows) < 40
    assert f"{len(rows)} of 40 trials are done" in said
    assert f"{len(rows)} settings" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ({"trials": 0}, 2, "--trials must be at least 1"),
        ({"workers": 0}, 2, "--workers must be at least 1"),
        ({"norms": "none,batch"}, 2, "--norms has 'batch'"),
        ({"sampler": "gp"}, 2, "no sampler 'gp'"),
        ({"norms": "none,sequence"}, 2, "model.time_steps is for norm frame or hidden"),
        ({"sampler": "bruteforce"}, 2, "tries every value: give optimizer.lr as a list"),
        ({"storage": "somewhere"}, 2, "none of sqlite:///FILE"),
        ({"storage": "postgresql://a:secret@127.0.0.1:9/x"}, 1, "cannot be reached"),
        ({"data": "/nowhere/at/all"}, 1, "does not exist"),
    ],
)
def test_mistakes_are_one_sentence(
    cli: Cli, flags: Flags, tmp_path: Path, more: dict[str, str], code: int, said: str
) -> None:
    got, _, err = cli(*flags(**{"out": tmp_path / "out", **more}))
    assert (got, err.count("\n")) == (code, 1), err
    assert said in err
    assert "secret" not in err
    assert not (tmp_path / "out").exists()


def test_a_database_that_is_a_link(cli: Cli, flags: Flags, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "study.db").symlink_to(tmp_path / "other.db")
    code, _, err = cli(*flags(out=out))
    assert (code, err.count("\n")) == (1, 1), err
    assert "study.db" in err
    assert not (tmp_path / "other.db").exists()


def test_the_best_settings_are_confirmed_with_fresh_seeds(
    cli: Cli, flags: Flags, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code, said, err = cli(*flags(trials=2, workers=2, out=out), "--confirm", "2")
    assert code == 0, err
    runs = sorted(path.name for path in (out / "confirm").iterdir())
    assert runs == ["hidden-2", "hidden-3", "none-2", "none-3"]
    found = verdict(sorted((out / "confirm").iterdir()))
    (quality,) = (one.quality for one in found.variants.values())
    assert quality is not None
    assert quality.interval is not None
    assert (quality.seeds, quality.paired) == (2, True)
    assert quality.answer in said
    rows = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    for norm in ("none", "hidden"):
        best = min(rows, key=lambda row: row["arms"][norm]["loss"])
        config = json.loads((out / "confirm" / f"{norm}-2" / "config.json").read_text())
        assert config["optimizer"]["lr"] == best["settings"]["optimizer.lr"]
    assert cli(*flags(trials=2, out=out), "--confirm", "1")[0] == 2
