"""Tables of studies against values computed by hand."""

import json
import re
from math import exp
from pathlib import Path
from statistics import mean, stdev

import pytest

from tools.studies import CURVES, TABLES, markdown

T_975 = {2: 4.302653}  # quantile of the t distribution by degrees of freedom
SEEDS = (1, 2, 3)


def write_run(root: Path, study: str, norm: str, seed: int, losses: dict, **config: object) -> None:
    """A finished run with one row per split and kind of statistics."""
    path = root / "studies" / study / f"{norm}-{seed}-{len(list(root.rglob('config.json')))}"
    path.mkdir(parents=True)
    config = {"recipe": "ptb-small-authors", "norm": norm, "seed": seed, "epochs": 5, **config}
    config["shared_initialisation"] = True
    (path / "config.json").write_text(json.dumps(config))
    rows = []
    for name, loss in losses.items():
        split, _, kind = name.partition(" ")
        row = {"updates": 100, "epoch": config["epochs"], "split": split, "loss": loss}
        row |= {"count": 10, "seconds": 1.0, "error": loss / 10, "lr": 1.0}
        rows.append(row | ({} if split == "train" else {"statistics": kind or "running"}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def interval(differences: list[float]) -> tuple[float, float, float]:
    middle, half = mean(differences), T_975[2] * stdev(differences) / len(differences) ** 0.5
    return middle, middle - half, middle + half


def numbers(cell: str) -> list[float]:
    return [float(x) for x in re.findall(r"[-+]?[\d.]+", cell.replace("−", "-").replace(",", ""))]


def test_gain_and_depth(tmp_path: Path) -> None:
    gains = {1: (0.01, -0.02, 0.03), 3: (-0.11, -0.09, -0.12), 5: (-0.21, -0.22, -0.17)}
    for layers, found in gains.items():
        for seed, gain in zip(SEEDS, found, strict=True):
            for norm, loss in (("none", 2.0 + seed / 10), ("sequence", 2.0 + seed / 10 + gain)):
                config = {"recipe": "librispeech-mini-depth", "epochs": 10}
                losses = {"train": 1.0, "valid": loss, "test": loss}
                write_run(tmp_path, "depth", norm, seed, losses, **config, model={"layers": layers})
    (table,) = TABLES["depth"](tmp_path)
    for row, found in zip(table.rows, gains.values(), strict=False):
        expected = list(found)
        assert numbers(row[4]) == pytest.approx(list(interval(expected)), abs=0.0051)
        assert row[1] == "3"
    assert [row[5] for row in table.rows[:3]] == ["not settled", "better", "better"]
    # With three equally spaced depths the slope is a quarter of the last gain minus the first.
    slopes = [(last - first) / 4 for first, last in zip(gains[1], gains[5], strict=True)]
    assert table.rows[3][0] == "trend"
    assert numbers(table.rows[3][4]) == pytest.approx(list(interval(slopes)), abs=0.0006)
    assert table.rows[3][5] == "better"


def test_fixed_and_shifted_streams(tmp_path: Path) -> None:
    effects = {"none": (0.02, 0.03, 0.01), "frame": (0.10, 0.07, 0.12)}
    for norm, found in effects.items():
        for seed, effect in zip(SEEDS, found, strict=True):
            for study, more in (("compressed-schedule", 0.0), ("mini-batches", effect)):
                base = {"train": 4.0, "train_eval": 4.2, "valid": 4.7, "test": 4.6}
                losses = {name: loss + seed / 100 + more for name, loss in base.items()}
                if norm == "frame":
                    losses["valid batch"] = losses["valid"] + 0.05
                write_run(tmp_path, study, norm, seed, losses)
    (table,) = TABLES["mini-batches"](tmp_path)
    rows = {row[0]: row[1:] for row in table.rows}
    for name, base in (
        ("training, in training mode", 4.0),
        ("test", 4.6),
        ("last validation", 4.7),
    ):
        fixed = [exp(base + seed / 100) for seed in SEEDS]
        changes = {
            norm: [
                exp(base + seed / 100 + effect) - value
                for seed, effect, value in zip(SEEDS, found, fixed, strict=True)
            ]
            for norm, found in effects.items()
        }
        more = [b - a for a, b in zip(changes["none"], changes["frame"], strict=True)]
        row = rows[name]
        assert numbers(row[0]) == pytest.approx([mean(fixed)], abs=0.06)
        for cell, differences in ((1, changes["none"]), (3, changes["frame"]), (4, more)):
            assert numbers(row[cell]) == pytest.approx(list(interval(differences)), abs=0.06)
    batch = [exp(4.75 + seed / 100) for seed in SEEDS]
    assert numbers(rows["last validation, batch statistics"][2]) == pytest.approx(
        [mean(batch)], abs=0.06
    )


def test_schedules_use_the_seeds_of_both(tmp_path: Path) -> None:
    for epochs in (3, 5):
        for norm in ("none", "frame"):
            for seed in SEEDS[: 2 if epochs == 3 and norm == "frame" else 3]:
                loss = 5.0 - epochs / 10 - (norm == "frame") * (0.05 + seed / 100)
                losses = {"valid": loss, "test": loss}
                write_run(tmp_path, "compressed-schedule", norm, seed, losses, epochs=epochs)
    (table,) = TABLES["compressed-schedule"](tmp_path)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["none, 5 epochs"][-1] == "baseline"
    assert rows["frame, 3 epochs"][0] == "2"
    change = exp(5.0 - 0.5 - 0.07) - exp(4.5)
    assert numbers(rows["frame, 5 epochs"][3])[0] == pytest.approx(change, abs=0.06)


def test_large_network_with_each_kind_of_statistics(tmp_path: Path) -> None:
    kinds = {"running": 4.5, "recalibrated": 4.45, "batch": 4.6}
    for seed in SEEDS:
        none = {"train_eval": 3.0, "valid": 4.4 + seed / 50, "test": 4.3}
        write_run(tmp_path, "large-scaled-down", "none", seed, none, recipe="ptb-large")
        frame = {"train_eval": 2.8, "test": 4.36, "test recalibrated": 4.35}
        frame |= {f"valid {kind}": loss + seed / 60 for kind, loss in kinds.items()}
        write_run(tmp_path, "large-scaled-down", "frame", seed, frame, recipe="ptb-large")
    (table,) = TABLES["large-scaled-down"](tmp_path)
    rows = {row[0]: row[1:] for row in table.rows}
    for kind, loss in kinds.items():
        differences = [exp(loss + s / 60) - exp(4.4 + s / 50) for s in SEEDS]
        for when in ("best", "last"):
            found = numbers(rows[f"{when} validation, {kind}"][2])
            assert found == pytest.approx(list(interval(differences)), abs=0.06)


def test_permuted_mnist_names_gamma(tmp_path: Path) -> None:
    arms = {"none": {}, "recurrent": {}, "recurrent 1": {"gamma": 1.0}}
    for name, model in arms.items():
        norm = name.split()[0]
        for seed in SEEDS:
            loss = 3.0 - 0.5 * len(model) - (norm == "recurrent") - seed / 10 * (norm == "none")
            config = {"recipe": "permuted-mnist", "model": model}
            kinds = {"test": loss + 1, "test recalibrated": loss} if model else {"test": loss}
            kinds |= {"valid": loss + 1, "valid recalibrated": loss} if model else {}
            losses = {"valid": loss, **kinds}
            write_run(tmp_path, "permuted-mnist", norm, seed, losses, **config)
    config = {"recipe": "permuted-mnist", "model": {"gamma": 2.0}}
    write_run(tmp_path, "permuted-mnist", "recurrent", 1, {}, **config)
    for path in tmp_path.rglob("config.json"):
        if "2.0" in path.read_text():
            (path.parent / "diverged.txt").write_text("the gradient is nan at update 1\n")
    (table,) = TABLES["permuted-mnist"](tmp_path)
    assert "γ 2.0: 1 " in table.note
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows.keys() == {"none", "recurrent, γ 0.1", "recurrent, γ 1.0"}
    assert numbers(rows["none"][1]) == [28.0]  # error rates of 29, 28 and 27 %
    assert numbers(rows["recurrent, γ 1.0"][1]) == [15.0]
    assert rows["recurrent, γ 0.1"][-1] == "20.0"
    assert (rows["none"][4], rows["recurrent, γ 1.0"][4]) == ("–", "25.0")


def test_curves_of_every_norm_and_kind_of_statistics(tmp_path: Path) -> None:
    for seed in SEEDS:
        for norm, more in (("none", 0.0), ("frame", -0.1)):
            for epochs in (3, 5):
                losses = {"valid": 4.0, "test": 5.0 + more - epochs / 10}
                write_run(tmp_path, "compressed-schedule", norm, seed, losses, epochs=epochs)
            kinds = ("running", "batch") if norm == "frame" else ("running",)
            losses = {f"valid {kind}": 4.0 + seed for kind in kinds} | {"test": 4.0}
            write_run(tmp_path, "large-scaled-down", norm, seed, losses, recipe="ptb-large")
    found = CURVES["compressed-schedule"](tmp_path)
    # These runs have the same number of updates.
    assert sorted(found.values["frame"][100]) == pytest.approx(3 * [exp(4.4)] + 3 * [exp(4.6)])
    assert list(found.values) == ["none", "frame"]
    large = CURVES["large-scaled-down"](tmp_path)
    assert sorted(large.values) == ["frame, batch", "frame, running", "none"]
    assert sorted(large.values["frame, batch"][5]) == pytest.approx([exp(4 + s) for s in SEEDS])
    (axes,) = large.draw().axes
    assert [line.get_label() for line in axes.lines] == list(large.values)


@pytest.mark.parametrize("name", ["unknown", *TABLES])
def test_a_study_without_runs_has_no_table(name: str, tmp_path: Path) -> None:
    assert markdown(tmp_path, name) == []
