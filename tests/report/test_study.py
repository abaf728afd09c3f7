"""The result of a search, from a trial table made by hand."""

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normrnn.errors import UserError
from normrnn.recipes.paper import PAPER
from normrnn.report.study import RecordedStudy, read_study, write
from normrnn.report.trials import as_csv, best, figure, markdown, pairs, sentences, table


def _arm(loss: float | None, diverged: bool = False) -> dict[str, Any]:
    if loss is None:
        return {"diverged": True, "loss": None, "reason": "the loss is nan at update 3"}
    return {"diverged": diverged, "loss": loss, "final": loss, "train": loss - 0.125, "updates": 9}


def _trial(number: int, lr: float, none: dict[str, Any], hidden: dict[str, Any]) -> dict[str, Any]:
    good = [a["loss"] for a in (none, hidden) if not a["diverged"]]
    return {
        "trial": number,
        "state": "complete",
        "value": min(good, default=None),
        "settings": {"optimizer.lr": lr, "train.batch": 32},
        "arms": {"none": none, "hidden": hidden},
    }


TRIALS = [
    _trial(0, 0.001, _arm(2.0), _arm(2.25)),
    _trial(1, 0.25, _arm(1.5), _arm(1.75)),
    _trial(2, 0.5, _arm(None), _arm(1.625)),
    _trial(3, 0.75, _arm(9.0, diverged=True), _arm(2.5)),
    _trial(4, 0.01, _arm(1.875), _arm(1.8125)),
    _trial(5, 1.0, _arm(None), _arm(8.5, diverged=True)),
]


def test_pairs_and_the_best_of_each_arm() -> None:
    found = pairs(TRIALS, "none", "hidden")
    assert (found.better, found.worse) == ([4], [0, 1])
    assert (found.only_other, found.only_baseline, found.neither) == ([2, 3], [], [5])
    top = [best(TRIALS, arm) for arm in ("none", "hidden")]
    assert [t["trial"] for t in top if t] == [1, 2]  # 8.5 and 9.0 diverged: no candidates
    assert best(TRIALS[5:], "none") is None


def test_in_words() -> None:
    none, hidden, both = sentences(TRIALS)
    assert none == (
        "norm none: best validation loss 1.5000, trial 1 (lr 0.25, batch 32); 3 of 6 diverged"
    )
    assert "1.6250, trial 2" in hidden
    middle = "median difference +0.2500 nats"  # of +0.25, +0.25 and -0.0625
    assert f"lower loss in 1 of 3 pairs where both trained ({middle}); 2 where" in both
    assert "2 where only norm hidden trained (learning rates from 0.5 on)" in both
    assert "0 where only none did, 1 where neither did" in both
    *_, both = sentences(TRIALS[2:3])
    assert "in 0 of 0 pairs where both trained; 1 where" in both


def test_what_was_pruned_is_said() -> None:
    pruned = {**TRIALS[0], "trial": 6, "state": "pruned", "arms": {}}
    said = sentences([*TRIALS, pruned])
    assert said[:3] == sentences(TRIALS)
    assert said[3].startswith("1 of 7 trials were pruned")


def test_fields_of_one_name_are_told_apart() -> None:
    one = {**TRIALS[0], "settings": {"optimizer.momentum": 0.5, "model.momentum": 0.25}}
    assert "trial 0 (optimizer.momentum 0.5, model.momentum 0.25)" in sentences([one])[0]
    columns = [name for _, names in table([one]).columns for name in names]
    assert columns[-2:] == ["optimizer.momentum", "model.momentum"]


def test_a_spreadsheet_has_one_number_a_cell() -> None:
    arm = {**_arm(2.0), "statistics": {"running": 2.0, "batch": 2.5}}
    (row,) = csv.DictReader(io.StringIO(as_csv([_trial(0, 0.1, _arm(2.5), arm)])))
    assert (row["hidden.statistics.running"], row["hidden.statistics.batch"]) == ("2.0", "2.5")


def test_table_3() -> None:
    rows = table(TRIALS, paper=PAPER["ptb-char"]).rows
    assert rows == [
        ["best baseline", "1.375", "1.500", "2.164", "0.25", "32"],
        ["best baseline, paper", "1.05", "1.10", "1.59", "0.42", "32"],
        ["best norm hidden", "1.500", "1.625", "2.344", "0.5", "32"],
        ["best norm hidden, paper", "1.07", "1.11", "1.60", "0.000371", "128"],
    ]
    text = markdown(TRIALS)
    assert text.startswith("| model | train | valid |")
    assert "| best norm hidden | 1.500 | 1.625 |" in text
    assert "paper" not in text


def test_files(tmp_path: Path) -> None:
    paths = write(RecordedStudy(tmp_path, TRIALS))
    assert [p.name for p in paths] == [
        "trials.jsonl",
        "study.json",
        "trials.csv",
        "summary.md",
        "loss-by-learning-rate.png",
    ]
    assert read_study(tmp_path).trials == TRIALS
    with (tmp_path / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["hidden.loss"] for row in rows] == ["2.25", "1.75", "1.625", "2.5", "1.8125", "8.5"]
    assert rows[2]["none.reason"] == "the loss is nan at update 3"
    assert [p.name for p in write(RecordedStudy(tmp_path / "none", []))] == [
        "trials.jsonl",
        "study.json",
        "trials.csv",
        "summary.md",
    ]
    (tmp_path / "trials.jsonl").write_text("{")
    assert read_study(tmp_path).problem == "is damaged: line 1 of trials.jsonl is no trial"
    assert "cannot be read" in read_study(tmp_path / "nothing").problem


def test_picture_of_losses() -> None:
    axes = figure(TRIALS).axes[0]
    assert axes.get_xscale() == "log"
    points = {c.get_label(): np.asarray(c.get_offsets()) for c in axes.collections}
    assert set(points) == {
        "baseline",
        "baseline, diverged",
        "norm hidden",
        "norm hidden, diverged",
    }
    assert sorted(map(tuple, points["baseline"])) == [(0.001, 2.0), (0.01, 1.875), (0.25, 1.5)]
    assert sorted(x for x, _ in points["baseline, diverged"]) == [0.5, 0.75, 1.0]
    assert len(axes.lines) == 3  # a line per pair that trained


def test_a_study_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(RecordedStudy(tmp_path, list(TRIALS)))
    before = (tmp_path / "trials.jsonl").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match=r"trials\.jsonl cannot be written: No space left"):
        write(RecordedStudy(tmp_path, list(TRIALS[:1])))
    assert (tmp_path / "trials.jsonl").read_bytes() == before
