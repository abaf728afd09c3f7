"""Recipes and normalisations of a user's own, by import path, with real worker processes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import normrnn
from normrnn import norms as norms_module
from normrnn.config import registry
from normrnn.config.registry import find, use
from normrnn.errors import UsageError, UserError
from normrnn.recipes import recipe
from tests.experiments.conftest import Cli
from tests.tiny_runs import rows_of
from tests.torchrun import environment


def test_compare_resume_and_evaluate(cli: Cli, own_directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    call = ["compare", "own_module:small", "--path", own_directory, "--out", out]
    norms = "none,own_module:halved"
    code, said, error = cli(*call, "--norms", norms)
    assert code == 0, error
    assert "halved" in said
    config = json.loads((out / "halved-1" / "config.json").read_text())
    assert (config["recipe"], config["norm"]) == ("own_module:small", "halved")
    assert config["optimizer"]["lr"] == 0.01
    code, _, error = cli(*call, "--norms", norms, "--epochs", "2", "--csv")
    assert code == 0, error
    assert rows_of(out / "halved-1")[-1]["epoch"] == 2
    assert (out / "halved-1" / "metrics.csv").read_text().count("\n") > 2
    assert cli("evaluate", out / "halved-1")[0] == 0  # known in this process by now
    rows = json.loads((out / "halved-1" / "evaluation.json").read_text())["rows"]
    assert {row["statistics"] for row in rows} == {"running"}  # the norm keeps none of its own
    run, name = out / "none-1", ["--use", "own_module:small", "--path", own_directory]
    del registry.recipes()["own_module:small"]
    del norms_module._TABLE["halved"]
    code, said, error = cli("info", out / "halved-1")
    assert (code, "own_module:small" in said, "| test |" in said) == (0, True, True), error
    call = ["export", run, "-o", tmp_path / "model"]
    code, _, error = cli(*call)
    assert (code, "--use" in error) == (1, True)
    code, said, error = cli(*call, *name)
    assert (code, bool(said)) == (0, True), error
    code, _, error = cli("gradients", run, *name)  # one target per sequence
    assert (code, "per step" in error) == (1, True)


def test_a_new_process_needs_the_name_again(own_directory: Path, tmp_path: Path) -> None:
    """And imports nothing without it, not even from the current directory."""

    def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "normrnn", *map(str, arguments)]
        return subprocess.run(
            command, cwd=own_directory, capture_output=True, text=True, check=False
        )

    run, name = tmp_path / "run", ["--use", "own_module:small", "--path", "."]
    done = call("train", "own_module:small", "--path", ".", "--out", run)
    assert done.returncode == 0, done.stderr
    (own_directory / "own_module.py").write_text(
        f"open({str(tmp_path / 'canary')!r}, 'w')\n" + (own_directory / "own_module.py").read_text()
    )
    for command in ("report", "verdict", "info"):
        done = call(command, run)
        assert done.returncode == 0, done.stderr
    for command in ("train", "evaluate"):
        done = call(command, run)
        assert (done.returncode, "own_module:small" in done.stderr) == (1, True)
    assert not (tmp_path / "canary").exists()
    done = call("train", run, *name, "--epochs", "2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "canary").exists()
    done = call("evaluate", run, *name)
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "evaluation.json").read_text())["recipe"] == "own_module:small"


def test_search(cli: Cli, own_directory: Path, tmp_path: Path) -> None:
    space = tmp_path / "space.json"
    space.write_text('{"model.hidden": [3, 5]}')
    call = ["search", "own_module:small", "--path", own_directory, "--out", tmp_path / "out"]
    call += ["--space", space, "--norms", "none,own_module:halved", "--trials", "2"]
    code, _, error = cli(*call, "--workers", "2")
    assert code == 0, error
    rows = [json.loads(line) for line in (tmp_path / "out/trials.jsonl").read_text().splitlines()]
    assert [set(row["arms"]) for row in rows] == [{"none", "halved"}] * 2


@pytest.mark.slow
def test_torchrun(own_directory: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "normrnn"]
    call = ["train", "own_module:small", "--path", str(own_directory), "--out", str(tmp_path / "r")]
    done = subprocess.run(
        [*launcher, *call], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert rows_of(tmp_path / "r")[-1]["split"] == "test"


def test_from_python(own_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    rows: list[dict] = []
    run = normrnn.train("own_module:small", path=own_directory, out="~/run", log=rows.append)
    assert [row["updates"] for row in rows] == [row["updates"] for row in run.rows]
    result = normrnn.evaluate(run.path)
    assert result["recipe"] == "own_module:small"
    assert sum(p.numel() for p in normrnn.load("~/run").parameters())
    other = replace(recipe("own_module:small"), norm="sequence")
    assert other.recipe == "own_module:small"
    assert normrnn.train(other, out=tmp_path / "a").norm == "sequence"
    assert normrnn.train(other, norm=None, out=tmp_path / "b").norm == "none"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_module", "module:name"),
        ("own_module:tiny", "tiny"),
        ("other_module:small", "other_module"),
        ("own_module:RATE", "RATE"),
        ("own_module:train", "train"),
        ("json:dumps", "already imported"),
    ],
)
def test_names_that_cannot_be_used(own_directory: Path, name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        use(name, own_directory)


def test_a_module_that_fails(own_directory: Path) -> None:
    (own_directory / "own_module.py").write_text("1 / 0")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        find("own_module:small", own_directory)
    assert "own_module" not in sys.modules
    with pytest.raises(UsageError, match="directory"):
        find("own_module:small", own_directory / "nowhere")
    assert os.fspath(own_directory / "nowhere") not in sys.path
