"""Which runs are compared with which."""

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

import normrnn
from normrnn.config.jsonio import flat, to_dict
from normrnn.errors import UsageError, UserError
from normrnn.recipes import read_config
from normrnn.reporting.groups import groups
from normrnn.reporting.result import Result, have_comparable_seconds, plain_runs
from normrnn.reporting.runs import load
from tests.reporting.made_runs import make_run, short_run, train_row


def test_arms_that_differ_in_any_setting_are_all_there_in_any_order() -> None:
    base = short_run("none", [5, 4, 3, 3], model={"gamma": 1.0})
    good = short_run("frame", [4, 3, 2, 2], model={"gamma": 0.1})
    bad = short_run("frame", [6, 5, 4, 4], model={"gamma": 1.0})
    for order in permutations([base, good, bad]):
        names = [arm.name for arm in groups(list(order))[0].arms]
        assert names == ["none", "frame (gamma 0.1)", "frame (gamma 1.0)"]
    own = short_run("frame", [5, 4, 3, 2], model={"gamma": None}, seed=2)
    scored = {"train_sequences": 9}  # changes no curve
    recurrent = short_run("recurrent", [5, 4, 3, 2], model={"gamma": None}, evaluation=scored)
    names = [arm.name for arm in groups([base, bad, own, recurrent])[0].arms]
    assert names == ["none", "frame", "recurrent"]  # 1.0 is the default of frame


def test_runs_with_other_settings_are_other_experiments() -> None:
    runs = [
        short_run(norm, [6, 5, 4, 3], recipe="mine", optimizer={"lr": lr})
        for lr in (1.0, 2.0)
        for norm in ("none", "frame")
    ]
    assert {g.title for g in groups(runs)} == {"mine, optimizer.lr 1.0", "mine, optimizer.lr 2.0"}
    assert [len(one.variants) for one in Result(runs).verdicts] == [1, 1]
    with pytest.raises(UsageError, match=r"optimizer\.lr 2\.0"):
        normrnn.verdict(runs)


def test_arms_tuned_apart_are_compared() -> None:
    runs = [short_run("none", [5, 4, 3, 3], seed, optimizer={"lr": 1.0}) for seed in (1, 2)]
    runs += [short_run("frame", [4, 3, 2, 2], seed, optimizer={"lr": 1.0}) for seed in (1, 2)]
    runs += [short_run("layer", [4, 3, 2, 1], seed, optimizer={"lr": 4.0}) for seed in (1, 2)]
    for order in (runs, runs[::-1], runs[2:] + runs[:2]):
        (found,) = Result(order).verdicts
        assert found.baseline == "none"
        assert sorted(found.variants) == ["frame (lr 1.0)", "layer (lr 4.0)"]
    other = short_run("none", [5, 4, 3, 3], 7, data_sha256="ab")  # other data stand alone
    assert sorted(len(one.runs) for one in Result([*runs, other]).verdicts) == [1, 6]


def test_two_baselines_are_two_variants() -> None:
    rates = {"none": (0.3, 0.5), "frame": (10.0,)}
    runs = [
        short_run(norm, [5, 4, 3, 3], recipe="ptb-small", optimizer={"lr": rate})
        for norm, some in rates.items()
        for rate in some
    ]
    names = [run.variant for group in groups(runs) for run in plain_runs(group)]
    assert len(set(names)) == len(names) == 3


@pytest.mark.parametrize("setting", [{"max_vocab": 1000}, {"level": "char"}])
def test_runs_of_another_measure_are_not_compared(setting: dict[str, object]) -> None:
    base = short_run("none", [5, 4, 3, 3], text={"level": "word", "max_vocab": 10000})
    other = short_run("frame", [4, 3, 2, 2], text={"level": "word", "max_vocab": 10000} | setting)
    assert len(groups([base, other])) == 2


def test_of_the_same_run_twice_the_one_that_got_further_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs = [short_run(n, [5, 4, 3, 3], s) for n in ("none", "frame") for s in (1, 2, 3)]
    longer = short_run("frame", [5, 4, 3, 3, 2, 2], 1)
    wanted = Result([run for run in runs if run.label != longer.label] + [longer]).to_dict()
    assert wanted["variants"]["frame"]["quality"]["seeds"] == 3
    for order in ([*runs, longer], [longer, *runs]):
        found = Result(order).to_dict()["variants"]["frame"]["quality"]
        assert found["variant"] == wanted["variants"]["frame"]["quality"]["variant"]
    assert "is the same run" in caplog.text


def test_seconds_only_where_runs_are_long_and_of_one_machine() -> None:
    runs = [
        replace(short_run(norm, [5.0] * 16), environments=[{"cpu": "x"}])
        for norm in ("none", "frame")
    ]
    assert have_comparable_seconds(runs)
    assert not have_comparable_seconds([runs[0], replace(runs[1], environments=[{"cpu": "y"}])])
    assert not have_comparable_seconds([replace(run, environments=[]) for run in runs])
    assert not have_comparable_seconds([replace(run, rows=run.rows[:9]) for run in runs])


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
    with pytest.raises(UserError, match="not a run directory"):
        load(tmp_path / "nowhere")


def test_progress(tmp_path: Path) -> None:
    run = load(make_run(tmp_path, seed=3, epochs=17))
    assert (run.progress, len(repr(run)) < 100) == ("17 of 17", True)
    assert load(make_run(tmp_path, norm="frame", epochs=17, until=400)).progress == "2 of 17"
    assert load(make_run(tmp_path, norm="layer", until=50)).progress == "50 updates"
    run = short_run("none", [5, 4, 3, 3, 2, 2], train={"segments": 2})
    assert (run.epochs_done, run.finished, run.progress) == (1.5, False, "1.5 of 3")


def test_a_missing_field_is_the_same_in_reports_and_when_resumed(tmp_path: Path) -> None:
    run = load(make_run(tmp_path, "ptb-medium"))
    assert "model" not in run.config
    resumed = flat(to_dict(read_config(run.config)))
    assert run.settings == {**resumed, "model.gamma": None}
