"""Arrays trained, resumed, evaluated and compared by the commands."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import normrnn
from normrnn.arrays.task import ArrayModel
from normrnn.cli import main
from normrnn.errors import UserError
from normrnn.reporting.groups import groups
from normrnn.reporting.page import runs_table
from normrnn.reporting.runs import load as load_run
from tests.tiny_runs import rows_of


def command(*arguments: str | Path) -> None:
    with pytest.raises(SystemExit) as exited:
        main([str(argument) for argument in arguments])
    assert exited.value.code == 0


def ragged(file: Path, count: int = 120, features: int = 3, first: int = 0) -> Path:
    """Three classes by the mean of the first feature, in noise."""
    random = np.random.default_rng(0)
    lengths, y = random.integers(4, 9, count), np.arange(count) % 3
    rows = random.normal(size=(lengths.sum(), features)).astype(np.float32)
    rows[:, 0] += 2.0 * np.repeat(y - 1, lengths)
    np.savez(file, x=rows, lengths=lengths, y=y + first)
    return file


def test_compare_evaluate_and_load(tmp_path: Path) -> None:
    data, out = ragged(tmp_path / "a.npz"), tmp_path / "out"
    small = ("--epochs", "6", "--model.hidden", "8", "--optimizer.lr", "0.05")
    command(
        "compare", "arrays", "--data", data, "--out", out, *small, "--norms", "none,sequence,frame"
    )
    for norm in ("none", "sequence", "frame"):
        run = out / f"{norm}-1"
        tests = [row for row in rows_of(run) if row["split"] == "test"]
        assert min(row["error"] for row in tests) < 0.2
        assert json.loads((run / "config.json").read_text())["target"] == "classes"
    command("evaluate", out / "frame-1")
    rows = json.loads((out / "frame-1" / "evaluation.json").read_text())["rows"]
    assert {(row["split"], row["statistics"]) for row in rows} >= {("test", "batch")}
    with pytest.raises(UserError, match="features 2; the network has 3"):
        normrnn.evaluate(out / "frame-1", ragged(tmp_path / "b.npz", features=2))
    with pytest.raises(UserError, match=r"\[5, 6, 7\], not \[0, 1, 2\]"):
        normrnn.evaluate(out / "frame-1", ragged(tmp_path / "b.npz", first=5))
    model = normrnn.load(out / "sequence-1")
    assert isinstance(model, ArrayModel)
    assert model(torch.zeros(5, 2, 3)).shape == (2, 3)
    assert (out / "report.html").exists()
    (group,) = groups([normrnn.reporting.load(path) for path in out.glob("*-1")])
    found, errors = normrnn.verdict(out), {row["error"] for row in rows_of(out / "none-1")[-1:]}
    assert (
        set(found.to_dict()["variants"]["frame"]["details"]["error"]["baseline"].values()) == errors
    )
    assert ("error rate" in str(found), "error rate 0." in found.details()) == (False, True)
    table = runs_table(group)
    column = table.head.index("error")
    assert all(0 <= float(row[column]) < 0.2 for row in table.rows)


@pytest.mark.parametrize("options", [(), ("--model.cell", "ligru", "--model.bidirectional")])
def test_a_resumed_run_is_the_same_to_the_bit(options: tuple[str, ...], tmp_path: Path) -> None:
    data = ragged(tmp_path / "a.npz")
    small = ("--data", data, "--model.hidden", "5", "--norm", "frame", *options)
    command("train", "arrays", *small, "--epochs", "2", "--out", tmp_path / "whole")
    command("train", "arrays", *small, "--epochs", "1", "--out", tmp_path / "parts")
    command("train", "arrays", *small, "--epochs", "2", "--out", tmp_path / "parts")
    one, two = (
        [{**row, "seconds": 0} for row in rows_of(tmp_path / name)] for name in ("whole", "parts")
    )
    assert one == two


@pytest.mark.parametrize("name", ["rmsprop", "adamw"])
def test_values_per_step(name: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 6, 2)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=100 + 50 * np.stack([x[..., 0], -x[..., 1]], 2))
    small = ("--epochs", "25", "--optimizer.name", name, "--optimizer.lr", "0.01")
    command("train", "arrays", "--data", tmp_path / "a.npz", *small, "--out", tmp_path / "r")
    test = next(row for row in rows_of(tmp_path / "r") if row["split"] == "test")
    assert test["loss"] ** 0.5 < 25  # half the deviation of the targets, in their units
    assert test["count"] == 9 * 6
    assert "error" not in test
    command("evaluate", tmp_path / "r")


def test_adding_with_recurrent_norm_and_gamma(tmp_path: Path) -> None:
    command(
        *("train", "adding", "--norm", "recurrent", "--model.gamma", "1.0", "--epochs", "1"),
        *("--arrays.sequences", "60", "--arrays.steps", "10", "--model.hidden", "4"),
        *("--out", tmp_path / "r"),
    )
    model = normrnn.load(tmp_path / "r")
    assert isinstance(model, ArrayModel)
    assert model.rnn.get_buffer("norm_l0.running_mean").shape[0] == 10
    assert model.values


@pytest.mark.parametrize(
    ("norm", "kind"),
    [("recurrent", "recalibrated"), ("hidden", "recalibrated"), ("frame", "running")],
)
def test_statistics_that_select_the_model(norm: str, kind: str, tmp_path: Path) -> None:
    """Recalibrated ones inside a recurrence, where running ones are too noisy."""
    command(
        *("train", "adding", "--norm", norm, "--epochs", "2", "--model.hidden", "4"),
        *("--arrays.sequences", "60", "--arrays.steps", "10", "--out", tmp_path / "r"),
    )
    rows = rows_of(tmp_path / "r")
    for split in ("valid", "train_eval"):
        assert {row["statistics"] for row in rows if row["split"] == split} == {kind}
    best = min((row for row in rows if row["split"] == "valid"), key=lambda row: row["loss"])
    scored = [r for r in rows if r["split"] == "best_valid" and r["statistics"] == kind]
    assert scored[0]["loss"] == pytest.approx(best["loss"], rel=1e-5)
    assert load_run(tmp_path / "r").selected_by == kind
