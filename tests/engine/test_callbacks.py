"""Rows for TensorBoard, CSV and callbacks: all of them, each once, also after a resume."""

import csv
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from normrnn.config.base import Config
from normrnn.engine.callbacks import CSV, TensorBoard
from normrnn.engine.interrupt import Interrupted
from normrnn.engine.launch import rank_and_size
from normrnn.engine.start import train
from normrnn.errors import UserError
from normrnn.experiments.training import run_training
from normrnn.extras import install_command
from normrnn.reporting.runs import load
from tests.tiny_runs import Silent


def watched(config: Config, out: Path, stop_at: int = -1) -> None:
    board = TensorBoard(out)
    try:
        train(config, out, Silent(stop_at), lambda _: None, [board])
        board()
    finally:
        board.close()


def points(out: Path) -> Counter[tuple[str, int, float]]:
    """Name, update and value of every scalar in all event files, as tensorboard reads them."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: Counter[tuple[str, int, float]] = Counter()
    for file in (out / "tensorboard").iterdir():
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found[value.tag, event.step, round(value.simple_value, 4)] += 1
    return found


def expected(out: Path) -> Counter[tuple[str, int, float]]:
    found: Counter[tuple[str, int, float]] = Counter()
    for line in (out / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        kind = " ".join(filter(None, (row["split"], row.get("statistics"))))
        for name in ("loss", "batch_ppl", "grad_norm", "lr"):
            if name in row:
                found[f"{name}/{kind}", row["updates"], round(row[name], 4)] += 1
    return found


def close(a: Counter[tuple[str, int, float]], b: Counter[tuple[str, int, float]]) -> bool:
    """Equal, values up to single precision."""
    keys = [sorted(c.elements()) for c in (a, b)]
    return len(keys[0]) == len(keys[1]) and all(
        x[:2] == y[:2] and x[2] == pytest.approx(y[2], rel=1e-5, abs=1e-3)
        for x, y in zip(*keys, strict=True)
    )


def test_every_row_once_through_a_resume(tiny_frame: Config, tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = replace(tiny_frame, epochs=2)
    with pytest.raises(Interrupted):
        watched(config, out, stop_at=25)
    assert close(points(out), expected(out))
    watched(config, out)
    assert close(points(out), expected(out))
    tags = {tag for tag, _, _ in points(out)}
    assert {
        "loss/train",
        "loss/valid recalibrated",
        "loss/valid batch",
        "loss/test running",
        "lr/train",
    } <= tags


def test_a_rank_without_others_is_the_first(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some shells have RANK=1 for another reason."""
    monkeypatch.setenv("RANK", "1")
    out = tmp_path / "run"
    run_training(replace(tiny, epochs=1), out, ["tensorboard"])
    assert close(points(out), expected(out))
    for size in ("x", "1"):
        with pytest.raises(UserError, match="WORLD_SIZE"):
            rank_and_size({"RANK": "1", "WORLD_SIZE": size, "NORMRNN_STORE": "s"})


def test_tensorboard_can_be_switched_on_later(tiny: Config, tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = replace(tiny, epochs=1)
    train(config, out, Silent(), lambda _: None)
    rows = (out / "metrics.jsonl").read_text()
    watched(config, out)  # finished before: nothing is trained, all is shown
    assert (out / "metrics.jsonl").read_text() == rows
    assert close(points(out), expected(out))


def test_missing_package_is_said_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=re.escape(install_command("report"))):
        TensorBoard(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_csv_and_callbacks_get_every_row_once(tiny: Config, tmp_path: Path) -> None:
    out, seen = tmp_path / "run", []
    with pytest.raises(Interrupted):
        train(tiny, out, Silent(30), lambda _: None, [CSV(out), seen.append])
    train(tiny, out, Silent(), lambda _: None, [CSV(out), seen.append])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    with (out / "metrics.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in found] == [row["loss"] for row in rows]
    assert [row["split"] for row in found] == [row["split"] for row in rows]
    assert seen == rows


def test_rows_as_a_data_frame(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_training(replace(tiny, epochs=1), tmp_path / "run")
    run = load(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows: len(rows)))
    assert run.frame() == len(run.rows)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pandas"):
        run.frame()
