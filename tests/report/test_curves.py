"""Averages, gaps, tables and pictures from rows with known answers."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from normrnn.errors import UserError
from normrnn.report.curves import (
    Point,
    best,
    first_below,
    gap,
    rate,
    trailing_average,
)
from normrnn.report.groups import Group
from normrnn.report.pictures import figure, save
from normrnn.report.runs import Run, load
from normrnn.report.tables import runs_table
from normrnn.runs.rows import epoch_averages
from tests.report.made_runs import short_run, train_row


def test_epoch_averages_pool_tokens_and_updates() -> None:
    rows = [train_row(1, 1, 4.0, 10), train_row(4, 1, 1.0, 20), train_row(5, 2, 1.0)]
    rows[1]["batch_ppl"] = 6.0  # over three updates
    first, second = epoch_averages(rows)
    expected = {"epoch": 1, "updates": 4, "seconds": 2.0, "count": 30, "loss": 2.0}
    assert first == {**expected, "batch_ppl": 5.0}
    assert (second["epoch"], second["updates"], second["loss"]) == (2, 5, 1.0)


def test_trailing_average_covers_one_epochs_worth() -> None:
    run = short_run("none", [5.0, 3.0, 3.0, 1.0, 1.0, 1.0])
    points = trailing_average(run)
    assert [p.updates for p in points] == [10, 15, 20, 25, 30]
    assert [p.loss for p in points] == pytest.approx([4, 3, 2, 1, 1])
    assert trailing_average(Run(Path(), {}, [])) == []


def test_best_and_first() -> None:
    run = short_run("frame", [5, 4, 3, 3.5])
    row = best(run, "valid", "batch")
    assert row is not None
    assert row["loss"] == 4.0
    assert best(run, "test", "batch") is None
    assert first_below([Point(1, 1, 3.0), Point(2, 2, 2.0)], 2.5) == Point(2, 2, 2.0)
    assert first_below([], 1.0) is None


def test_run_directory_as_data_torn_line_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"norm": "none", "seed": 1}')
    assert load(tmp_path).rows == []
    row = train_row(1, 1, 2.0)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + '\n{"updates": 2, "ep')
    assert load(tmp_path).rows == [row]
    assert load(tmp_path).split("train") == [row]
    (tmp_path / "metrics.jsonl").write_text("what\n")
    with pytest.raises(UserError, match="damaged"):
        load(tmp_path)
    with pytest.raises(UserError, match="no run directory"):
        load(tmp_path / "nowhere")


def test_table_and_picture(tmp_path: Path) -> None:
    runs = [
        short_run("none", [5, 4, 3, 3]),
        short_run("frame", [4, 3, 2, 2]),
        Run(Path(), {"norm": "frame", "seed": 2, "epochs": 2}, []),
    ]
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    console.print(runs_table(Group("mine", "", runs)))
    text = console.export_text()
    console.file.close()
    assert "baseline, seed 1" in text
    assert "20.1" in text  # e^3, the baseline's best epoch
    assert "33.1" in text  # e^3.5, its best validation
    assert "not begun" in text
    save(figure(runs), tmp_path / "new" / "curves.png")
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_gap_and_rate() -> None:
    run = short_run("none", [5, 4, 3, 3])
    # Two rows of ten tokens, pooled: (5 + 4) / 2; the validation lies half a nat above the second.
    assert [row["gap"] for row in gap(run)] == pytest.approx([0.0, 0.5])
    assert [row["updates"] for row in gap(run)] == [10, 20]
    assert rate(run) == 40 / 10
