"""Verdicts on rows: forms of input, figures by hand, answers, what is printed."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

import normrnn
from normrnn.cli import main
from normrnn.errors import UsageError
from normrnn.verdicts.figures import crossing, median
from normrnn.verdicts.intervals import paired_interval, rank_sum_p, t_quantile, welch_interval
from normrnn.verdicts.rows import Point
from tests.reporting.made_runs import make_run

# From published tables: two-sided 95 %, 99 %.
T_TABLE = {1: (12.706, 63.657), 2: (4.303, 9.925), 4: (2.776, 4.604), 30: (2.042, 2.750)}


def rows(**variants: list[list[float]]) -> list[dict[str, Any]]:
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


def test_crossings_and_medians_by_hand() -> None:
    points = [Point(10, 8.0, 1.0), Point(20, 6.0, 3.0), Point(30, 2.0, 4.0), Point(40, 3.0, 5.0)]
    assert crossing(points, 5.0) == Point(22.5, 5.0, 3.25)
    assert crossing(points, 9.0) == points[0]
    assert crossing(points, 1.0) is None
    assert median([3.0, math.inf, 1.0]) == 3.0
    assert math.isinf(median([1.0, math.inf]))


def test_quality_and_speed_by_hand() -> None:
    data = rows(none=[[8, 6, 4], [8, 6, 5]], frame=[[7, 4, 3], [7, 5, 3]])
    found = normrnn.verdict(data)
    assert found.baseline == "none"
    quality, speed = found.variants["frame"].quality, found.variants["frame"].speed
    assert quality is not None
    assert speed is not None
    assert (quality.baseline, quality.other) == ({1: 5, 2: 6}, {1: 4, 2: 4})
    assert quality.estimate == pytest.approx(-1.5)
    assert quality.interval == pytest.approx(welch_interval([5, 6], [4, 4], 0.95)[1:])
    assert speed.target == 5
    assert speed.baseline == {1: 25, 2: 30}
    assert speed.other == {1: pytest.approx(10 + 20 / 3), 2: 20}
    ratio = math.sqrt((10 + 20 / 3) * 20 / (25 * 30))
    assert speed.estimate == pytest.approx(ratio)
    seconds = found.variants["frame"].seconds
    assert seconds is not None
    assert seconds.baseline == {1: 2.5, 2: 3.0}
    # Paired: the interval of the differences of each seed.
    quality = normrnn.verdict(data, paired=True).variants["frame"].quality
    assert quality is not None
    assert quality.interval == pytest.approx(paired_interval([-1, -2], 0.95)[1:])


def test_speed_has_no_side() -> None:
    """Exchanging variant and baseline inverts the ratio and its interval."""
    data = rows(a=[[8, 6, 4], [8, 6, 5], [9, 6, 4.5]], b=[[7, 4, 3], [7, 5, 3], [6, 4, 2]])
    one = normrnn.verdict(data, baseline="a").variants["b"].speed
    other = normrnn.verdict(data, baseline="b").variants["a"].speed
    assert one is not None
    assert other is not None
    assert one.interval is not None
    assert other.interval is not None
    assert one.target == other.target
    assert one.estimate == pytest.approx(1 / other.estimate)
    assert one.interval[0] == pytest.approx(1 / other.interval[1])
    assert {one.answer, other.answer} == {"better", "worse"}


def test_forms_of_input(tmp_path: Path) -> None:
    data = rows(none=[[8, 6, 4], [8, 6, 5]], frame=[[7, 4, 3], [7, 5, 3]])
    wanted = normrnn.verdict(data).to_dict()
    columns = {name: [row.get(name) for row in data] for name in data[0]}
    assert normrnn.verdict(columns).to_dict() == wanted

    class Frame:  # what is used of a DataFrame
        columns = tuple(data[0])

        def to_dict(self, form: str) -> dict[str, list[Any]]:
            assert form == "list"
            return {name: [row.get(name) for row in data] for name in data[0]}

    assert normrnn.verdict(Frame()).to_dict() == wanted
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(data[0]))
        writer.writeheader()
        writer.writerows({**row, "variant": row["variant"].replace("none", "")} for row in data)
    assert normrnn.verdict(path).to_dict() == normrnn.verdict(str(path)).to_dict() == wanted


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ([], "no rows"),
        ([{"variant": "a", "seed": 1, "step": 1, "split": "valid"}], "value"),
        ([{"variant": "a", "seed": 1, "step": 1, "split": "valid", "value": "x"}], "value"),
        ({"variant": ["a"], "seed": [1, 2]}, "lengths"),
        (3, "int"),
        (2 * [{"variant": "a", "seed": 1, "step": 1, "split": "valid", "value": 1}], "step 1"),
        ([*rows(a=[[3, 2]]), {**rows(a=[[3, 2]])[0], "value": 9}], "step 10"),
        ([{"variant": "a", "seed": 0.5, "step": 1, "split": "valid", "value": 1}], "seed"),
        ([{"variant": "a", "seed": math.nan, "step": 1, "split": "valid", "value": 1}], "seed"),
        ([{"variant": "a", "seed": math.inf, "step": 1, "split": "valid", "value": 1}], "seed"),
        ([{"variant": "a", "seed": 1, "step": math.inf, "split": "valid", "value": 1}], "step"),
        ([{"variant": "a", "seed": 1, "step": 1, "split": "loss", "value": 1}], "loss"),
        ({"variant": "a", "seed": 1, "step": 1, "split": "valid", "value": 1}, "variant"),
    ],
)
def test_rows_that_are_none(data: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        normrnn.verdict(data)


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes("variant,é".encode("latin-1"))
    with pytest.raises(UsageError, match="UTF-8"):
        normrnn.verdict(tmp_path / "rows.csv")


def test_other_names_of_splits_and_variants() -> None:
    data = rows(**{"0": BASE, "1": LOWER})
    other = [{**row, "split": "Val" if row["split"] == "valid" else "Test"} for row in data]
    found = normrnn.verdict([{**row, "variant": int(row["variant"])} for row in other], baseline=0)  # type: ignore[arg-type]
    assert found.to_dict() == normrnn.verdict(data, baseline="0").to_dict()


def _answers(found: Any, name: str = "b") -> tuple[str, str]:
    one = found.variants[name]
    return one.quality.answer, one.speed.answer if one.speed else ""


def test_answers() -> None:
    base = [[8, 6, 4.0], [8, 6, 4.01], [8, 6, 3.99]]
    shifted = [[v - 1 for v in seed] for seed in base]
    better = normrnn.verdict(rows(a=base, b=shifted))
    assert _answers(better)[0] == "better"
    assert _answers(normrnn.verdict(rows(a=shifted, b=base)))[0] == "worse"
    higher = normrnn.verdict(rows(a=base, b=shifted), higher_is_better=True)
    assert _answers(higher)[0] == "worse"
    assert higher.variants["b"].quality is not None
    same = normrnn.verdict(rows(a=base, b=base), margin=0.01)
    assert _answers(same) == ("equivalent", "equivalent")
    assert _answers(normrnn.verdict(rows(a=base, b=base), margin=0.0001))[0] == "not settled"
    assert _answers(normrnn.verdict(rows(a=base[:1], b=shifted[:1])))[0] == "one seed"
    # Significant but inside the margin: equivalent.
    tiny = [[v - 0.02 for v in seed] for seed in base]
    assert (
        _answers(normrnn.verdict(rows(a=base, b=tiny), paired=True, margin=0.02))[0] == "equivalent"
    )


def test_several_variants_have_wider_intervals_and_a_ranking() -> None:
    base = [[8, 6, 4.0], [8, 6, 4.2], [8, 6, 3.8]]
    others = {name: [[v - d for v in s] for s in base] for name, d in (("b", 0.3), ("c", 1.0))}
    alone = normrnn.verdict(rows(a=base, b=others["b"])).variants["b"].quality
    found = normrnn.verdict(rows(a=base, **others))
    quality = found.variants["b"].quality
    assert alone is not None
    assert quality is not None
    assert alone.interval is not None
    assert quality.interval == pytest.approx(
        welch_interval(list(alone.baseline.values()), list(alone.other.values()), 0.975)[1:]
    )
    assert [name for name, _ in found.ranking] == ["c", "b", "a"]


def test_diverged_runs_count_against_their_variant() -> None:
    base = [[8, 6, 4.0], [8, 6, 4.2], [8, 6, 3.8], [8, 6, 4.1], [8, 6, 3.9]]
    better = [[v - 1 for v in seed] for seed in base]
    data = rows(a=base, b=better)
    for row in data:
        if row["variant"] == "b" and row["seed"] > 2:
            row["value"] = math.nan
    found = normrnn.verdict(data)
    assert found.diverged == {"b": (3, 5)}
    quality = found.variants["b"].quality
    assert quality is not None
    assert quality.interval is None
    assert math.isinf(quality.middle[1])
    assert quality.answer == "not settled"
    assert str(found).startswith("b: 3 of 5 runs diverged")
    for row in data:
        if row["variant"] == "b":
            row["value"] = math.nan
    assert _answers(normrnn.verdict(data))[0] == "worse"
    json.dumps(normrnn.verdict(data).to_dict(), allow_nan=False)


def test_a_target_that_is_missed() -> None:
    base = [[8, 6, 4.0 + i / 10] for i in range(5)]
    better = [[7, 5, 2.0 + i / 10] for i in range(5)]
    speed = normrnn.verdict(rows(a=base, b=better), target=3).variants["b"].speed
    assert speed is not None
    assert all(map(math.isinf, speed.baseline.values()))
    assert speed.interval is None
    assert speed.answer == "better"
    assert "never" in str(normrnn.verdict(rows(a=base, b=better), target=3))


@pytest.mark.parametrize(
    "names", [("none", "frame"), ("none", *(f"norm-{i:020}" for i in range(4)))]
)
def test_lines_are_short(names: tuple[str, ...]) -> None:
    values = {
        name: [[180.0 - i, 150.123, 119.456 + seed] for seed in range(5)]
        for i, name in enumerate(names)
    }
    found = normrnn.verdict(rows(**values))
    lines = str(found).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert sum(not line.startswith("ranking") for line in lines) <= 3 * len(names)
    assert len(repr(found)) < 400
    assert "<table>" in found._repr_html_()
    assert all(len(line) <= 80 for line in found.details().splitlines())


BASE = [[8, 6, 4.0], [8, 6, 4.2], [8, 6, 3.8], [8, 6, 4.1]]
LOWER = [[v - 1 - i / 9 for v in seed] for i, seed in enumerate(BASE)]


def test_long_names_and_large_values() -> None:
    name = "a rather long variant name (lr 0.003, momentum 0.995)"
    millions = [[v * 1e6 for v in seed] for seed in BASE]
    data = rows(none=millions, **{name: [[v / 2 for v in seed] for seed in millions]})
    data = [{**row, "step": row["step"] * 100_000} for row in data]
    data += rows(**{"\x1b[31m\n" + "x" * 100: BASE})
    lines = str(normrnn.verdict(data)).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(not line.startswith("ranking") for line in lines) <= 3 * 2 + 1
    assert not any("\x1b" in line for line in lines)
    small = str(normrnn.verdict(rows(none=[[2e-8], [3e-8]], b=[[1e-8], [2.5e-8]])))
    assert "e−08" in small


@pytest.mark.parametrize("missing", ["a", "b"])
def test_paired_runs_without_validation(missing: str) -> None:
    data = rows(a=BASE, b=LOWER)
    gone = [r for r in data if (r["variant"], r["seed"], r["split"]) != (missing, 1, "valid")]
    found = normrnn.verdict(gone, paired=True)
    one = found.variants["b"]
    assert one.speed is not None
    assert set(one.speed.baseline) == set(one.speed.other) == {2, 3, 4}
    assert any(f"{missing} seed 1" in note for note in found.notes)


def test_runs_without_test_values_are_named_and_quality_is_one_measure() -> None:
    data = rows(a=BASE, b=LOWER, c=LOWER)
    data = [r for r in data if (r["variant"], r["split"]) != ("c", "test")]
    found = normrnn.verdict(data)
    assert {v.quality.label for v in found.variants.values() if v.quality} == {"best validation"}
    assert dict(found.ranking)["a"] == pytest.approx(4.025)
    assert any("c seed 1" in note for note in found.notes)
    assert "c seed 1" in str(found)


def test_ranking_uses_all_seeds_of_a_variant() -> None:
    found = normrnn.verdict(rows(a=BASE, b=LOWER[:2], c=LOWER[:3]), paired=True)
    assert dict(found.ranking)["a"] == pytest.approx(5.025)


def test_missing_values_are_not_a_divergence() -> None:
    data = rows(a=BASE, b=LOWER)
    wide = [
        {**row, "split": split, "value": row["value"] if split == row["split"] else math.nan}
        for row in data
        if row["split"] == "valid"
        for split in ("valid", "test", "train")
    ] + [row for row in data if row["split"] == "test"]
    assert normrnn.verdict(wide).to_dict() == normrnn.verdict(data).to_dict()
    wide[1]["value"] = ""
    assert normrnn.verdict(wide).to_dict() == normrnn.verdict(data).to_dict()


def test_three_diverged_runs_against_none_are_worse() -> None:
    data = rows(a=BASE[:3], b=LOWER[:3])
    for row in data:
        row["value"] = math.nan if row["variant"] == "b" else row["value"]
    found = normrnn.verdict(data)
    assert _answers(found)[0] == "worse"
    assert found.to_dict()["variants"]["b"]["quality"]["estimate"] is None
    for row in data:
        row["value"] = math.nan
    assert normrnn.verdict(data).variants["b"].details == {}


def test_a_target_that_only_one_reaches_has_no_ratio() -> None:
    speed = normrnn.verdict(rows(a=BASE, b=LOWER), target=3.2).variants["b"].speed
    assert speed is not None
    assert speed.answer == "better"
    assert speed.to_dict()["estimate"] is None


def test_seeds_that_do_not_vary_settle_nothing() -> None:
    found = normrnn.verdict(rows(a=[[8, 4.0]] * 3, b=[[8, 3.0]] * 3))
    quality = found.variants["b"].quality
    assert quality is not None
    assert (quality.answer, quality.interval) == ("not settled", None)


def test_area_between_curves_validated_at_other_steps() -> None:
    """The mean of the line 100 - step over the range that both runs cover."""
    steps = {"a": range(0, 101, 10), "b": range(5, 101, 13)}
    data = [
        {"variant": v, "seed": s, "step": t, "split": "valid", "value": 100.0 - t + s / 10}
        for v, some in steps.items()
        for s in range(3)
        for t in some
    ]
    area = normrnn.verdict(data).variants["b"].details["area"]
    assert area.estimate == pytest.approx(0, abs=1e-9)
    assert area.baseline[0] == pytest.approx(100 - (5 + 96) / 2)


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


def test_half_widths() -> None:
    found = normrnn.verdict(rows(a=BASE, b=LOWER))
    quality, speed = found.variants["b"].quality, found.variants["b"].speed
    assert quality is not None
    assert speed is not None
    assert quality.interval is not None
    assert quality.half_width == pytest.approx(quality.interval[1] - quality.estimate)
    assert speed.interval is not None
    assert speed.half_width == pytest.approx(speed.interval[1] / speed.estimate)
    assert "±" in found.details()


@pytest.mark.parametrize("paired", [False, True])
def test_run_directories_and_their_csv_agree(
    paired: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for norm in ("none", "frame", "layer"):
        for seed in (1, 2, 3):
            make_run(tmp_path / "runs", "ptb-small", norm, seed)
    directories = sorted((tmp_path / "runs").iterdir())
    for directory in directories if paired else ():
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(
            json.dumps({**config, "shared_initialisation": True})
        )
    wanted = normrnn.verdict(directories)
    assert wanted.measure == "perplexity"
    assert wanted.paired == paired
    with pytest.raises(SystemExit) as exited:
        main(["verdict", *map(str, directories), "--csv", str(tmp_path / "rows.csv")])
    assert exited.value.code == 0
    assert capsys.readouterr().out.strip() == str(wanted)
    found = normrnn.verdict(tmp_path / "rows.csv").to_dict()
    assert found["variants"] == wanted.to_dict()["variants"]
    with pytest.raises(SystemExit) as exited:
        main(["verdict", str(tmp_path / "rows.csv"), "--json"])
    assert exited.value.code == 0
    assert json.loads(capsys.readouterr().out) == found
