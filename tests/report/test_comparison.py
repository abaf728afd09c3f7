"""Averages, savings and sentences from rows with known answers."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from normrnn.errors import UserError
from normrnn.report.compare import (
    Point,
    best,
    epoch_averages,
    first_below,
    gap,
    rate,
    savings,
    sentence,
    statistics_sentence,
    trailing_average,
    verdict,
)
from normrnn.report.groups import Group
from normrnn.report.pictures import figure, save
from normrnn.report.runs import Run, load
from normrnn.report.tables import paper_table, runs_table


def _train(updates: int, epoch: int, loss: float, count: int = 10) -> dict:
    seconds = updates / 2
    row = {"updates": updates, "epoch": epoch, "split": "train", "loss": loss, "count": count}
    return {**row, "seconds": seconds, "lr": 1.0, "grad_norm": 1.0, "batch_ppl": 2.0}


def _run(norm: str, losses: list[float], seed: int = 1) -> Run:
    """Two train rows of ten tokens an epoch, the validation half a nat above."""
    rows = []
    for i, loss in enumerate(losses):
        rows.append(_train(5 * (i + 1), i // 2 + 1, loss))
        if i % 2:
            kinds = ("running",) if norm == "none" else ("running", "recalibrated", "batch")
            for kind in kinds:
                row = {**rows[-1], "split": "valid", "statistics": kind, "loss": loss + 0.5}
                rows.append(row)
    return Run(Path(norm), {"norm": norm, "seed": seed, "epochs": len(losses) // 2}, rows)


def test_epoch_averages_pool_tokens_and_updates() -> None:
    rows = [_train(1, 1, 4.0, 10), _train(4, 1, 1.0, 20), _train(5, 2, 1.0)]
    rows[1]["batch_ppl"] = 6.0  # over three updates
    first, second = epoch_averages(Run(Path(), {"norm": "none"}, rows))
    expected = {"epoch": 1, "updates": 4, "seconds": 2.0, "count": 30, "loss": 2.0}
    assert first == {**expected, "batch_ppl": 5.0}
    assert (second["epoch"], second["updates"], second["loss"]) == (2, 5, 1.0)


def test_trailing_average_covers_one_epochs_worth() -> None:
    run = _run("none", [5.0, 3.0, 3.0, 1.0, 1.0, 1.0])
    points = trailing_average(run)
    assert [p.updates for p in points] == [10, 15, 20, 25, 30]
    assert [p.loss for p in points] == pytest.approx([4, 3, 2, 1, 1])
    assert trailing_average(Run(Path(), {}, [])) == []


def test_savings_against_the_same_seed() -> None:
    baseline = _run("none", [5, 4, 4, 3, 3, 2.5, 2.4, 2.4])
    quick = _run("frame", [5, 3, 2.4, 2.2, 2, 2, 2, 2])
    (saving,) = savings([baseline], [quick, _run("frame", [9] * 8, seed=2)])
    assert saving.loss == pytest.approx(2.4)
    assert saving.baseline.updates == 40
    assert saving.other is not None
    assert saving.other == pytest.approx(Point(20, 10.0, 2.3))
    text = sentence("frame", [saving])
    assert "50% fewer updates and 50% less time" in text
    assert "20 instead of 40 updates" in text
    assert "10 instead of 20 seconds" in text


def test_sentences_for_the_other_cases() -> None:
    baseline = _run("none", [5, 4, 3, 3])
    assert "did not reach" in sentence("frame", savings([baseline], [_run("frame", [5] * 4)]))
    assert "no baseline" in sentence("frame", [])
    late = _run("frame", [5, 4, 3.5, 3.1, 2.9, 2.9])
    assert "25% more updates" in sentence("frame", savings([baseline], [late]))
    runs = [_run(n, [5, 4, 3, 3], s) for s in (1, 2) for n in ("none", "frame")]
    (text,) = verdict(runs)
    assert "mean of 2 seeds" in text


def test_an_early_lead_that_is_lost_is_said() -> None:
    baseline = _run("none", [6, 5, 4, 3, 2, 1])
    # Averages over an epoch, from update 10 on: 5.5, 4.5, 3.5, 2.5, 1.5 and 4.5, 3.5, 3, 2.5, 2.
    (text,) = verdict([baseline, _run("frame", [5, 4, 3, 3, 2, 2])])
    assert "did not reach the baseline's best training loss of 1.500 nats. At the same" in text
    assert "its training loss was the lower one until update 20. Its best" in text
    (never,) = verdict([baseline, _run("frame", [7, 6, 5, 4, 3, 2])])
    assert "did not reach" in never
    assert "the lower one" not in never


def test_best_and_first() -> None:
    run = _run("frame", [5, 4, 3, 3.5])
    row = best(run, "valid", "batch")
    assert row is not None
    assert row["loss"] == 4.0
    assert best(run, "test", "batch") is None
    assert first_below([Point(1, 1, 3.0), Point(2, 2, 2.0)], 2.5) == Point(2, 2, 2.0)
    assert first_below([], 1.0) is None


def test_run_directory_as_data_torn_line_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"norm": "none", "seed": 1}')
    assert load(tmp_path).rows == []
    row = _train(1, 1, 2.0)
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
        _run("none", [5, 4, 3, 3]),
        _run("frame", [4, 3, 2, 2]),
        Run(Path(), {"norm": "frame", "seed": 2, "epochs": 2}, []),
    ]
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    console.print(runs_table(Group("mine", "", runs)).rich())
    text = console.export_text()
    console.file.close()
    assert "baseline, seed 1" in text
    assert "20.1" in text  # e^3, the baseline's best epoch
    assert "33.1" in text  # e^3.5, its best validation
    assert "not begun" in text
    save(figure(runs), tmp_path / "new" / "curves.png")
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_unfinished_runs_are_compared_as_far_as_both_got() -> None:
    """The baseline has gone on to losses that the other has not had time for."""
    baseline = _run("none", [5, 4, 3, 3, 2, 2])
    other = _run("frame", [4, 3, 2.5, 2.5])
    other.config["epochs"] = 3
    (text,) = verdict([baseline, other])
    assert "best training loss of 3.000 nats" in text  # that of two epochs, not of three
    assert "25% fewer updates" in text  # 15 instead of 20
    assert "was 20.1 against the baseline's 33.1" in text  # e^3 and e^3.5
    assert "compared are the updates that both have" in text
    (text,) = verdict([baseline, _run("frame", [4, 3, 2.5, 2.5])])  # finished as asked
    assert "No saving: the frame-wise normalised network did not reach" in text
    assert "was 20.1 against the baseline's 12.2" in text


def test_finished_seeds_alone_are_averaged() -> None:
    runs = [_run(norm, [5, 4, 3, 3], seed) for seed in (1, 2) for norm in ("none", "frame")]
    late = [_run(norm, [9, 9], 3) for norm in ("none", "frame")]
    for run in late:
        run.config["epochs"] = 2
    (text,) = verdict([*runs, *late])
    assert "(mean of 2 seeds)" in text
    assert "33.1 ± 0.0" in text
    assert "1 more seed had not finished." in text
    rows = paper_table(Group("mine", "", [*runs, *late])).rows
    assert rows[0][1:] == ["all 2 (2 of 3 seeds)", "20.1 ± 0.0", "33.1 ± 0.0"]


def test_the_training_loss_of_a_sequence_wise_language_model_is_no_measure() -> None:
    """In training it sees what it predicts: compared is validation, and nothing shows its train."""
    baseline, ahead = _run("none", [5, 4, 3, 3]), _run("sequence", [1, 3.5, 1, 2.9])
    for run in (baseline, ahead):
        run.config["text"] = {"level": "word"}
    (text,) = verdict([baseline, ahead])
    assert "best validation loss of 3.500 nats" in text
    assert "needed as many updates" in text  # first below at the same validation, not in training
    assert "Its training loss is not compared" in text
    assert "overfits" not in text
    assert gap(ahead) == []
    table = paper_table(Group("mine", "", [baseline, ahead]))
    assert [row[2] for row in table.rows] == ["20.1", "–"]
    assert "has no train figure" in table.note
    labels = [line.get_label() for line in figure([baseline, ahead]).axes[0].lines]
    assert labels == ["baseline, train", "baseline, valid", "sequence, valid"]
    # Without a text, as in speech, nothing is given away: both directions are there anyway.
    (text,) = verdict([_run("none", [5, 4, 3, 3]), _run("sequence", [1, 3.5, 1, 2.9])])
    assert "best training loss of 3.000 nats" in text
    assert "overfits more" in text


def test_gap_and_rate() -> None:
    run = _run("none", [5, 4, 3, 3])
    # Two rows of ten tokens, pooled: (5 + 4) / 2; the validation lies half a nat above the second.
    assert [row["gap"] for row in gap(run)] == pytest.approx([0.0, 0.5])
    assert [row["updates"] for row in gap(run)] == [10, 20]
    assert rate(run) == 40 / 10


def test_batch_and_population_statistics_in_words() -> None:
    runs = [_run(norm, [5, 4, 3, 3], seed) for seed in (1, 2) for norm in ("none", "frame")]
    for run in runs:
        for row in run.rows:
            if row.get("statistics") == "batch":
                row["loss"] += 0.1
            if row.get("statistics") == "recalibrated" and run.seed == 1:
                row["loss"] -= 0.1
    text = statistics_sentence(runs)
    assert "36.6 ± 0.0, 3.5 above the baseline's 33.1 ± 0.0 (worse in 2 of 2 seeds)" in text
    assert "31.5 ± 2.2, 1.6 below the baseline's 33.1 ± 0.0 (worse in 0 of 2 seeds)" in text
    assert statistics_sentence(runs[:1]) == ""
