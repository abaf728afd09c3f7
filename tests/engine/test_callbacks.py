"""Rows for the terminal, TensorBoard, CSV and callbacks: each once, also after a resume."""

import csv
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from normrnn.config.base import NATS, Config, Measure
from normrnn.engine.callbacks import Display, describe
from normrnn.engine.loop import Interrupted
from normrnn.errors import UserError
from normrnn.extras import install_command
from normrnn.processes import rank_and_size
from normrnn.runs.records import read_rows
from normrnn.speech.config import FRAMES
from normrnn.text.config import CHARACTERS, WORDS
from tests.tiny_runs import run_tiny

ROW = {"epoch": 1, "updates": 9, "split": "valid", "statistics": "running", "loss": 1.0}


@pytest.mark.parametrize(
    ("measure", "more", "said"),
    [
        (WORDS, {}, "loss 1.0000  ppl 2.72"),
        (CHARACTERS, {}, "loss 1.0000  bpc 1.4427"),
        (FRAMES, {"fer": 0.25}, "loss 1.0000  FER 25.00%"),
        (NATS, {}, "loss 1.0000"),
    ],
)
def test_a_row_is_shown_in_its_measure(measure: Measure, more: dict, said: str) -> None:
    for keeps, kind in ((True, " (running)"), (False, "")):
        text = describe({**ROW, **more}, 2, measure, keeps)
        assert text == f"epoch 1/2  update 9  valid{kind}  {said}"


def test_speed_and_time_left(tiny: Config, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    display = Display(replace(tiny, epochs=55), 1453)
    for i in range(3):
        monkeypatch.setattr("time.monotonic", lambda i=i: 0.2 * i)
        row = {"epoch": 9, "updates": 17000 + i, "split": "train", "seconds": 0.2 * i}
        display({**row, "loss": 4.3, "count": 640})
    lines = capsys.readouterr().out.splitlines()
    assert [line.count("left") for line in lines] == [0, 1, 1]
    assert lines[2].endswith("ppl 73.70  3:29:43 left")  # 62,913 updates are to come


def points(out: Path) -> Counter[tuple[str, int, float]]:
    """Name, update and value of every scalar in all event files, as tensorboard reads them."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return Counter(
        (value.tag, event.step, value.simple_value)
        for file in (out / "tensorboard").iterdir()
        for event in LegacyEventFileLoader(str(file)).Load()
        for value in event.summary.value
    )


def expected(out: Path) -> Counter[tuple[str, int, float]]:
    return Counter(
        (f"{name}/{kind}", row["updates"], float(np.float32(row[name])))
        for row in read_rows(out)
        for kind in [" ".join(filter(None, (row["split"], row.get("statistics"))))]
        for name in ("loss", "batch_ppl", "grad_norm", "lr")
        if name in row
    )


def test_every_row_once_through_a_resume(tiny_frame: Config, tmp_path: Path) -> None:
    """In TensorBoard, in metrics.csv and for callbacks; also those of a run that had ended."""
    out, seen = tmp_path / "run", []
    config = replace(tiny_frame, epochs=2)
    for stop_at in (25, -1):
        try:
            run_tiny(config, out, stop_at, [seen.append], ["tensorboard", "csv"])
        except Interrupted:
            assert stop_at == 25
        rows = read_rows(out)
        assert seen == rows
        assert points(out) == expected(out)
        with (out / "metrics.csv").open(newline="") as file:
            table = list(csv.DictReader(file))
        losses = [(row["split"], row["loss"]) for row in rows]
        assert [(r["split"], float(r["loss"])) for r in table] == losses
    tags = {tag for tag, _, _ in points(out)}
    kinds = {"loss/valid recalibrated", "loss/valid batch", "loss/test running"}
    assert tags >= {"loss/train", "lr/train", *kinds}


def test_logs_can_be_switched_on_later(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is trained again. Some shells have RANK=1 for another reason."""
    monkeypatch.setenv("RANK", "1")
    out, config = tmp_path / "run", replace(tiny, epochs=1)
    run_tiny(config, out)
    rows = (out / "metrics.jsonl").read_text()
    (out / "metrics.csv").symlink_to(out / "config.json")  # is replaced, not written through
    run_tiny(config, out, logs=["tensorboard", "csv"])
    assert (out / "metrics.jsonl").read_text() == rows
    assert points(out) == expected(out)
    assert len((out / "metrics.csv").read_text().splitlines()) == 1 + len(rows.splitlines())
    for size in ("x", "1"):
        with pytest.raises(UserError, match="WORLD_SIZE"):
            rank_and_size({"RANK": "1", "WORLD_SIZE": size, "NORMRNN_STORE": "s"})


def test_missing_packages(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=re.escape(install_command("report"))):
        run_tiny(tiny, out, logs=["tensorboard"])
    assert not out.exists()
