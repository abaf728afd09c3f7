"""The result of a search, from a trial table made by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normrnn.errors import UserError
from normrnn.reporting import study as studies
from normrnn.reporting.pictures import new_figure
from normrnn.reporting.study import RecordedStudy, best, counted, lines, pairs, read_study
from tools.tables import best_settings_table


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
    assert pairs(TRIALS, "none", "hidden") == ([0.25, 0.25, -0.0625], (2, 0))
    top = [best(TRIALS, arm) for arm in ("none", "hidden")]
    assert [t["trial"] for t in top if t] == [1, 2]  # 8.5 and 9.0 diverged: no candidates
    assert best(TRIALS[5:], "none") is None


def test_pruned_settings_count_for_no_variant() -> None:
    """Even if the first variant had finished with the best loss of all."""
    pruned = {**_trial(6, 0.3, _arm(0.5), _arm(0.4)), "state": "pruned"}
    half = {**_trial(7, 0.3, _arm(0.5), _arm(0.4)), "arms": {"none": _arm(0.5)}}
    every = [*TRIALS, pruned, half]
    assert counted(every) == TRIALS
    assert pairs(every, "none", "hidden") == pairs(TRIALS, "none", "hidden")
    assert best(every, "none") == TRIALS[1]
    assert "2 of 8" in lines(every)[-1]
    assert max(map(len, lines(every))) <= 80
    assert len(lines(every)) <= 7


def test_table_3_and_fields_of_one_name() -> None:
    one = {**TRIALS[0], "settings": {"optimizer.momentum": 0.5, "model.momentum": 0.25}}
    assert "model.momentum 0.25" in " ".join(lines([one]))
    table = best_settings_table(RecordedStudy(Path("x"), [one]))
    assert table.head[-2:] == ["optimizer.momentum", "model.momentum"]
    study = RecordedStudy(Path("x"), TRIALS, {"config": {"recipe": "ptb-char"}})
    assert best_settings_table(study).rows == [
        ["none", "1.375", "1.500", "0.25", "32"],
        ["none, paper", "1.050", "1.100", "0.42", "32"],
        ["hidden", "1.500", "1.625", "0.5", "32"],
        ["hidden, paper", "1.070", "1.110", "0.000371", "128"],
    ]


def test_a_study_is_written_whole_and_read_as_far_as_it_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    studies.write(RecordedStudy(tmp_path, TRIALS))
    assert {path.name for path in tmp_path.iterdir()} == {"trials.jsonl", "study.json"}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(UserError, match=r"trials\.jsonl cannot be"):
            studies.write(RecordedStudy(tmp_path, TRIALS[:1]))
    assert read_study(tmp_path).trials == TRIALS
    (tmp_path / "study.json").write_text('{"a":' * 3000 + "1" + "}" * 3000)  # flattened for a page
    assert read_study(tmp_path).problem
    (tmp_path / "trials.jsonl").write_text("{")
    assert read_study(tmp_path).problem.endswith("line 1 is not a trial")
    assert "cannot be read" in read_study(tmp_path / "nothing").problem


def test_picture_of_losses() -> None:
    axes = new_figure().subplots()
    studies.draw(axes, RecordedStudy(Path("x"), TRIALS))
    assert axes.get_xscale() == "log"
    points = {c.get_label(): np.asarray(c.get_offsets()) for c in axes.collections}
    assert set(points) == {"none", "none, diverged", "hidden", "hidden, diverged"}
    assert sorted(map(tuple, points["none"])) == [(0.001, 2.0), (0.01, 1.875), (0.25, 1.5)]
    assert sorted(x for x, _ in points["none, diverged"]) == [0.5, 0.75, 1.0]
    assert len(axes.lines) == 3  # a line per pair that trained
    assert axes.get_ylabel() == "loss"
    values = RecordedStudy(Path("x"), TRIALS, {"config": {"recipe": "arrays", "target": "values"}})
    axes = new_figure().subplots()
    studies.draw(axes, values)
    assert (axes.get_ylabel(), axes.get_yscale()) == ("RMSE", "log")
    assert np.asarray(axes.collections[0].get_offsets())[1] == pytest.approx((0.25, 1.5**0.5))
