"""Verdicts on rows: forms of input, figures by hand, answers, what is printed."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import normrnn
from normrnn.cli import main
from normrnn.errors import UsageError, UserError
from normrnn.verdicts.result import verdict_of
from normrnn.verdicts.rows import Point, crossing, read_rows
from normrnn.verdicts.verdict import paired_interval, rank_sum_p, t_quantile, welch_interval
from tests.reporting.made_runs import make_run

# From published tables: two-sided 95 %, 99 %.
T_TABLE = {1: (12.706, 63.657), 2: (4.303, 9.925), 4: (2.776, 4.604), 30: (2.042, 2.750)}
BASE = [[8, 6, 4.0], [8, 6, 4.2], [8, 6, 3.8], [8, 6, 4.1]]
LOWER = [[v - 1 - i / 9 for v in seed] for i, seed in enumerate(BASE)]
SIMPLE = {"none": [[8, 6, 4], [8, 6, 5]], "frame": [[7, 4, 3], [7, 5, 3]]}


def rows(**variants: Any) -> list[dict[str, Any]]:
    """Validation values every 10 steps, one list per seed; the test value is 1 above the best."""
    found = []
    for name, seeds in variants.items():
        for seed, values in enumerate(seeds, 1):
            key = {"variant": name, "seed": seed}
            found += [
                {**key, "step": 10 * i, "split": "valid", "value": v, "seconds": float(i)}
                for i, v in enumerate(values, 1)
            ]
            found.append(
                {**key, "step": 10 * len(values), "split": "test", "value": min(values) + 1}
            )
    return found


def figure(data: Any, name: str = "quality", variant: str = "b", **options: Any) -> dict[str, Any]:
    """A figure of the verdict on rows, as JSON has it; those of `details` too."""
    one = normrnn.verdict(data, **options).to_dict()["variants"][variant]
    return {**one, **one["details"]}[name]


def shifted(by: float, seeds: list[list[float]] = BASE) -> list[list[float]]:
    return [[value + by for value in seed] for seed in seeds]


def test_intervals_by_published_values() -> None:
    for degrees, (wide, wider) in T_TABLE.items():
        assert t_quantile(0.95, degrees) == pytest.approx(wide, abs=6e-4)
        assert t_quantile(0.99, degrees) == pytest.approx(wider, abs=6e-4)
    found = paired_interval([0.5, 1.0, 1.5, 2.0, 2.5], 0.95)
    half = 2.776445 * math.sqrt(0.625 / 5)
    assert found == pytest.approx((1.5, 1.5 - half, 1.5 + half), abs=1e-5)
    # Equal sizes and variances: Welch's degrees of freedom are those of the pooled test.
    half = t_quantile(0.95, 4) * math.sqrt(2 / 3)
    assert welch_interval([1, 2, 3], [5, 6, 7], 0.95) == pytest.approx((4, 4 - half, 4 + half))
    assert rank_sum_p([1, 2, 3], [4, 5, math.inf]) == pytest.approx(0.1)
    assert rank_sum_p([1.0, math.inf], [1.0, math.inf]) == 1
    many = list(range(12))
    assert rank_sum_p(many, [v + 20 for v in many]) < 1e-4  # by the normal approximation


def test_crossings_by_hand() -> None:
    points = [Point(10, 8.0, 1.0), Point(20, 6.0, 3.0), Point(30, 2.0, 4.0), Point(40, 3.0, 5.0)]
    assert crossing(points, 5.0) == Point(22.5, 5.0, 3.25)
    assert crossing(points, 9.0) == points[0]
    assert crossing(points, 1.0) is None


def test_quality_and_speed_by_hand() -> None:
    data = rows(**SIMPLE)
    assert normrnn.verdict(data).baseline == "none"
    quality = figure(data, variant="frame")
    assert (quality["baseline"], quality["variant"]) == ({"1": 5, "2": 6}, {"1": 4, "2": 4})
    assert quality["estimate"] == pytest.approx(-1.5)
    assert quality["interval"] == pytest.approx(welch_interval([5, 6], [4, 4], 0.95)[1:])
    speed = figure(data, "speed", "frame")
    assert (speed["target"], speed["baseline"]) == (5, {"1": 25, "2": 30})
    assert speed["variant"] == {"1": pytest.approx(10 + 20 / 3), "2": 20}
    ratio = math.sqrt((10 + 20 / 3) * 20 / (25 * 30))
    assert speed["estimate"] == pytest.approx(ratio)
    assert figure(data, "seconds", "frame")["baseline"] == {"1": 2.5, "2": 3.0}
    # Paired: the interval of the differences of each seed.
    quality = figure(data, variant="frame", paired=True)
    assert quality["interval"] == pytest.approx(paired_interval([-1, -2], 0.95)[1:])


def test_speed_has_no_side() -> None:
    """Exchanging variant and baseline inverts the ratio and its interval."""
    data = rows(a=[[8, 6, 4], [8, 6, 5], [9, 6, 4.5]], b=[[7, 4, 3], [7, 5, 3], [6, 4, 2]])
    one, other = figure(data, "speed"), figure(data, "speed", "a", baseline="b")
    assert one["target"] == other["target"]
    assert one["estimate"] == pytest.approx(1 / other["estimate"])
    assert one["interval"][0] == pytest.approx(1 / other["interval"][1])
    assert {one["answer"], other["answer"]} == {"better", "worse"}


def test_forms_of_input(tmp_path: Path) -> None:
    data = rows(**SIMPLE)
    wanted = normrnn.verdict(data).to_dict()
    columns = {name: [row.get(name) for row in data] for name in data[0]}

    class Frame:  # what is used of a DataFrame
        columns = tuple(data[0])

        def to_dict(self, form: str) -> dict[str, list[Any]]:
            assert form == "list"
            return {name: [row.get(name) for row in data] for name in data[0]}

    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(data[0]))
        writer.writeheader()
        writer.writerows({**row, "variant": row["variant"].replace("none", "")} for row in data)
    for form in (columns, Frame(), path, str(path)):
        assert normrnn.verdict(form).to_dict() == wanted
    # Other names of splits, and variants that are numbers.
    names: dict[str, Any] = {"none": 0, "frame": 1, "valid": "Val", "test": "Test"}
    other = [{**r, "variant": names[r["variant"]], "split": names[r["split"]]} for r in data]
    found = normrnn.verdict(other, baseline=0)  # type: ignore[arg-type]
    assert found.variants["1"].to_dict() == normrnn.verdict(data).variants["frame"].to_dict()


ROW = {"variant": "a", "seed": 1, "step": 1, "split": "valid", "value": 1}


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ([], "no rows"),
        ([{name: value for name, value in ROW.items() if name != "value"}], "value"),
        ([{**ROW, "value": "x"}], "value"),
        ({"variant": ["a"], "seed": [1, 2]}, "lengths"),
        (ROW, "lists"),
        (3, "int"),
        ([ROW, ROW], "step 1"),
        *(([{**ROW, "seed": seed}], "seed") for seed in (0.5, math.nan, math.inf)),
        ([{**ROW, "step": math.inf}], "step"),
        ([{**ROW, "split": "loss"}], "loss"),
        (b"variant,\xe9", "UTF-8"),
        *(([ROW], {"margin": margin}) for margin in (-1, math.nan)),
        *(([ROW], {"target": target}) for target in (math.inf, "1")),
        ([ROW], {"baseline": "x"}),
    ],
)
def test_wrong_rows_and_options(data: Any, named: str | dict[str, Any], tmp_path: Path) -> None:
    options, named = ({}, named) if isinstance(named, str) else (named, *named)
    if isinstance(data, bytes):
        (tmp_path / "rows.csv").write_bytes(data)
        data = tmp_path / "rows.csv"
    with pytest.raises(UserError, match=named):
        normrnn.verdict(data, **options)


CLOSE = [[8, 6, 4.0], [8, 6, 4.01], [8, 6, 3.99]]


@pytest.mark.parametrize(
    ("a", "b", "options", "answer"),
    [
        (CLOSE, shifted(-1, CLOSE), {}, "better"),
        (shifted(-1, CLOSE), CLOSE, {}, "worse"),
        (CLOSE, shifted(-1, CLOSE), {"higher_is_better": True}, "worse"),
        (CLOSE, CLOSE, {}, "equivalent"),
        (CLOSE, CLOSE, {"margin": 0.0001}, "not settled"),
        (CLOSE[:1], shifted(-1, CLOSE[:1]), {}, "one seed"),
        # Significant but inside the margin.
        (CLOSE, shifted(-0.02, CLOSE), {"paired": True, "margin": 0.02}, "equivalent"),
        # Seeds that do not vary settle nothing.
        ([[8, 4.0]] * 3, [[8, 3.0]] * 3, {}, "not settled"),
    ],
)
def test_answers(a: Any, b: Any, options: dict[str, Any], answer: str) -> None:
    assert figure(rows(a=a, b=b), **options)["answer"] == answer


def test_unfinished_runs_settle_nothing_and_validations_with_a_test_value_select() -> None:
    runs = read_rows(rows(a=CLOSE, b=shifted(-1, CLOSE)))
    found = verdict_of([replace(run, complete=run.seed > 1) for run in runs]).variants["b"]
    assert found.to_dict()["quality"]["answer"] == "not settled"
    valid = [Point(1, 5.0), Point(2, 3.0), Point(3, 4.0), Point(4, 6.0)]
    tests = [Point(3, 7.0), Point(4, 9.0)]  # none at the best validation
    assert replace(runs[0], splits={"valid": valid, "test": tests}).selected_test_value() == 7.0


def test_higher_is_better_mirrors_all_figures() -> None:
    data = rows(a=BASE, b=LOWER)
    mirrored = [{**row, "value": -row["value"]} for row in data]
    for name in ("quality", "last_validation"):
        one, other = figure(data, name), figure(mirrored, name, higher_is_better=True)
        assert one["answer"] == other["answer"]
        assert one["interval"] == pytest.approx([-bound for bound in other["interval"][::-1]])
        assert list(one["variant"].values()) == [-value for value in other["variant"].values()]
    speed = figure(mirrored, "speed", higher_is_better=True)
    assert speed == figure(data, "speed") | {"target": speed["target"]}
    assert speed["target"] == -figure(data, "speed")["target"]


def test_several_variants_have_wider_intervals_and_a_ranking() -> None:
    base = [[8, 6, 4.0], [8, 6, 4.2], [8, 6, 3.8]]
    others = {"b": shifted(-0.3, base), "c": shifted(-1, base)}
    alone = figure(rows(a=base, b=others["b"]))
    first, second = ([*alone[key].values()] for key in ("baseline", "variant"))
    found = rows(a=base, **others)
    assert figure(found)["interval"] == pytest.approx(welch_interval(first, second, 0.975)[1:])
    assert [name for name, _ in normrnn.verdict(found).ranking] == ["c", "b", "a"]
    fewer = normrnn.verdict(rows(a=BASE, b=LOWER[:2], c=LOWER[:3]), paired=True)
    assert dict(fewer.ranking)["a"] == pytest.approx(5.025)  # of all its seeds


def test_diverged_runs_count_against_their_variant() -> None:
    base = [[8, 6, 4.0], [8, 6, 4.2], [8, 6, 3.8], [8, 6, 4.1], [8, 6, 3.9]]
    data = rows(a=base, b=[[math.nan] * 3 if i > 1 else s for i, s in enumerate(shifted(-1, base))])
    found = normrnn.verdict(data)
    assert found.diverged == {"b": [3, 5]}
    quality = figure(data)
    assert (quality["interval"], quality["estimate"]) == (None, None)
    assert quality["answer"] == "not settled"
    assert str(found).startswith("b: 3 of 5 runs diverged")
    assert "diverged vs" in str(found)
    for seeds in (3, 4):  # all runs against none
        data = rows(a=BASE[:seeds], b=[[math.nan]] * seeds)
        assert figure(data)["answer"] == "worse"
        json.dumps(normrnn.verdict(data).to_dict(), allow_nan=False)
    every = normrnn.verdict([{**row, "value": math.nan} for row in data]).to_dict()["variants"]["b"]
    assert every == {"quality": None, "speed": None, "seconds": None, "details": {}}


def test_a_target_that_is_missed() -> None:
    base = [[8, 6, 4.0 + i / 10] for i in range(5)]
    data = rows(a=base, b=[[7, 5, 2.0 + i / 10] for i in range(5)])
    speed = figure(data, "speed", target=3)
    assert set(speed["baseline"].values()) == {None}
    assert (speed["estimate"], speed["interval"], speed["answer"]) == (None, None, "better")
    assert "never" in str(normrnn.verdict(data, target=3))


LONG = "a rather long variant name (lr 0.003, momentum 0.995)"


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-8])
@pytest.mark.parametrize(
    "names",
    [
        ("none", "frame"),
        ("none", *(f"norm-{i:020}" for i in range(4))),
        ("none", LONG, "\x1b[31m\n" + "x" * 100),
    ],
)
def test_lines_are_short(names: tuple[str, ...], scale: float) -> None:
    values = {
        name: [[scale * v for v in (180.0 - i, 150.123, 119.456 + seed)] for seed in range(5)]
        for i, name in enumerate(names)
    }
    data = [{**row, "step": row["step"] * 100_000} for row in rows(**values)]
    found = normrnn.verdict(data)
    lines, details = str(found).splitlines(), found.details().splitlines()
    assert all(len(line) <= 80 and "\x1b" not in line for line in [*lines, *details])
    assert sum(line[0] != " " or line[2] != " " for line in lines) <= 3 * len(names)
    assert len(details) > len(lines)
    assert ("e−0" in str(found)) == (scale < 1)
    assert len(repr(found)) < 400 or LONG in names
    assert "<pre>" in found._repr_html_()


def test_runs_that_lack_a_split_are_named() -> None:
    for missing in ("a", "b"):
        data = [
            row
            for row in rows(a=BASE, b=LOWER)
            if (row["variant"], row["seed"], row["split"]) != (missing, 1, "valid")
        ]
        speed = figure(data, "speed", paired=True)
        assert set(speed["baseline"]) == set(speed["variant"]) == {"2", "3", "4"}
        assert f"{missing} seed 1" in normrnn.verdict(data, paired=True).notes[0]
    data = rows(a=BASE, b=LOWER, c=LOWER)
    data = [row for row in data if (row["variant"], row["split"]) != ("c", "test")]
    found = normrnn.verdict(data)
    assert {figure(data, variant=name)["label"] for name in "bc"} == {"best validation"}
    assert dict(found.ranking)["a"] == pytest.approx(4.025)
    assert "c seed 1" in str(found)


def test_missing_values_are_not_a_divergence() -> None:
    data = rows(a=BASE, b=LOWER)
    wide = [
        {**row, "split": split, "value": row["value"] if split == row["split"] else math.nan}
        for row in data
        if row["split"] == "valid"
        for split in ("valid", "test", "train")
    ] + [row for row in data if row["split"] == "test"]
    assert normrnn.verdict(wide).to_dict() == normrnn.verdict(data).to_dict()
    last = {"variant": "a", "seed": 1, "step": 99, "split": "valid"}
    for value, bad in (("", {}), (None, {}), ("nan", {"a": [1, 4]}), ("inf", {"a": [1, 4]})):
        found = normrnn.verdict([*wide, {**last, "value": value}])
        assert found.diverged == bad, value
    assert "'dev'" in normrnn.verdict([*data, {**last, "split": "dev", "value": 1}]).notes[0]


def test_speed_before_the_learning_rate_drops() -> None:
    rates = [0.1, 0.1, 1, 1, 1, 0.5]

    def early(rates: list[float]) -> Any:
        data = [
            {"variant": v, "seed": s, "step": t, "split": "valid", "value": 9 - t - s / 9, "lr": lr}
            for v in "ab"
            for s in range(3)
            for t, lr in enumerate(rates, 1)
        ]
        return normrnn.verdict(data).variants["b"].details.get("speed_before_drop")

    assert early(rates).target == pytest.approx(4)  # the fifth validation, not the second
    assert early(rates[:5]) is None


@pytest.mark.parametrize("paired", [False, True])
def test_run_directories(paired: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more: Any = {"shared_initialisation": True} if paired else {}
    for norm in ("none", "frame", "layer"):
        for seed in (1, 2, 3):
            make_run(tmp_path, "ptb-small", norm, seed, **more)
    found = normrnn.verdict(tmp_path)
    assert (found.measure, found.paired) == ("perplexity", paired)
    assert normrnn.verdict(sorted(tmp_path.iterdir())).to_dict() == found.to_dict()
    as_json = json.dumps(found.to_dict(), indent=2)
    for option, wanted in ((), str(found)), (["--details"], found.details()), (["--json"], as_json):
        with pytest.raises(SystemExit) as exited:
            main(["verdict", str(tmp_path), *option])
        assert (exited.value.code, capsys.readouterr().out.strip()) == (0, wanted)
    if not paired:
        with pytest.raises(UsageError, match="paired"):
            normrnn.verdict(tmp_path, paired=True)
