"""What `tools.windows` says of a run, against the run's own rows."""

import json
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch

from normrnn.config.measure import perplexity
from normrnn.runs.rows import read_rows
from normrnn.runs.store import RunDirectory
from normrnn.text.config import LanguageConfig
from normrnn.text.task import LanguageTask
from tests.tiny_runs import run_tiny
from tools.windows import main, places, statistics_over, tables


@pytest.mark.usefixtures("saved_with_running")
def test_of_runs(tiny: LanguageConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With dropout and without: running statistics and those of the first windows give what the run
    itself was validated with."""
    every = replace(tiny.evaluation, recalibrate_windows=100)
    dropped = replace(tiny, norm="frame", seed=2, epochs=1, evaluation=every)
    plain = replace(dropped, seed=1, model=replace(dropped.model, dropout=0.0))
    output = tmp_path / "study" / "windows.json"
    where = ["--data", tiny.data, "--output", str(output)]
    for config in (dropped, plain):
        run_tiny(config, tmp_path / str(config.seed))
        capsys.readouterr()
        main([str(tmp_path / str(config.seed)), *where])
    printed, records = capsys.readouterr().out, json.loads(output.read_text())
    assert [one["seed"] for one in records] == [1, 2]
    for one in records:
        rows = read_rows(tmp_path / str(one["seed"]) / "metrics.jsonl")
        found = {
            row["statistics"]: row["loss"]
            for row in rows
            if row["split"] == "valid" and row["updates"] == one["updates"]
        }
        assert one["valid"]["running"] == pytest.approx(found["running"], abs=1e-6)
        assert one["valid"]["first"] == pytest.approx(found["recalibrated"], abs=1e-6)
        assert len(set(one["valid"].values())) > 2
        shown = f"{perplexity(found['recalibrated']) - perplexity(found['running']):+.2f}"
        assert f"| {shown} |" in printed
    on = [name for name in records[1]["valid"] if "regularisers on" in name]
    assert on == [f"{name}, regularisers on" for name in ("first", "last", "very last")]
    assert not any("regularisers on" in name for name in records[0]["valid"])


def test_dropout_widens_what_is_taken_with_it(tiny: LanguageConfig, tmp_path: Path) -> None:
    """The lowest layer's variance, 1/(1 − p) times the one without in the mean of its features."""
    run_tiny(replace(tiny, norm="frame", epochs=1), tmp_path / "run")
    model = LanguageTask.load(RunDirectory(tmp_path / "run"), torch.device("cpu"))
    task = LanguageTask.open(replace(tiny, norm="frame"), model)
    off, on = (
        statistics_over(model, task, range(50), regularised=regularised)
        for regularised in (False, True)
    )
    ratio = (on["rnn.norm_l0.running_var"] / off["rnn.norm_l0.running_var"]).mean().item()
    assert ratio == pytest.approx(1 / (1 - tiny.model.dropout), rel=0.15)
    assert not model.training


def test_places_go_round() -> None:
    """After ten of 300 the last hundred end with the tenth; shorter texts have no hundred."""
    found = places(10, 300)
    assert found["last"] == [*range(210, 300), *range(10)]
    assert found["very last"] == [*range(290, 300), *range(10)]
    assert found["next"] == list(range(10, 110))
    assert places(5, 30)["last"] == [*range(5, 30), *range(5)]


def test_a_table_by_hand() -> None:
    """Two seeds: perplexities 4 and 6 instead of 2 and 3."""
    about = {"recipe": "ptb-small", "norm": "frame", "regularised": False}
    about |= {"updates": 2179, "read": 726, "windows": 1453}
    records = [
        {**about, "seed": seed, "valid": {"running": running, "first": first}}
        for seed, running, first in ((1, log(2), log(4)), (2, log(3), log(6)))
    ]
    (table,) = tables(records)
    rows = table.rows
    assert rows[0] == [
        "ptb-small, frame, after 726 of 1,453 windows",
        "2",
        "running",
        "2.50",
        "–",
        "–",
    ]
    assert rows[1][2:] == ["first", "5.00", "+2.50", "+2.00, +3.00"]
