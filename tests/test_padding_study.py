"""What `tools.padding` says of a run, against statistics taken by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from normrnn.runs.store import RunDirectory
from normrnn.speech.config import SpeechConfig
from normrnn.speech.corpus import read_speech
from normrnn.speech.task import SpeechTask
from tests.tiny_runs import run_tiny
from tools.padding import FILE, distance, main, table

ROWS = torch.tensor([[1.0], [3.0]])


def test_distance_by_hand() -> None:
    kept = torch.tensor([0.0]), torch.tensor([4.0])
    away, ratio = distance(ROWS, kept)  # mean 2, variance 1
    assert away == pytest.approx(1.0)
    assert ratio == pytest.approx(np.log(2))
    away, ratio = distance(ROWS, kept, zeros=2)  # 1, 3, 0, 0: mean 1, variance 1.5
    assert away == pytest.approx(0.5)
    assert ratio == pytest.approx(np.log(2 / np.sqrt(1.5)))


@pytest.mark.usefixtures("saved_with_running")
def test_of_runs(
    tiny_speech: SpeechConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both ways of counting: the lowest layer's distances are those of numpy."""
    whole = replace(tiny_speech, epochs=1, train=replace(tiny_speech.train, piece_frames=0))
    runs = [tmp_path / name for name in ("unpadded", "padded")]
    for run, counted in zip(runs, (False, True), strict=True):
        run_tiny(replace(whole, model=replace(whole.model, count_padding=counted)), run)
    output = tmp_path / FILE
    where = ["--data", whole.data, "--output", str(output)]
    capsys.readouterr()
    main([*map(str, runs), *where])
    printed, records = capsys.readouterr().out, json.loads(output.read_text())
    assert "| unpadded frames, pieces of 0, batch 4, pool 2 | 1 |" in printed
    assert "| with padding, pieces of 0, batch 4, pool 2 | 1 |" in printed
    assert [one["counted"] for one in records] == [False, True]
    assert 0 < records[0]["padding"] == records[1]["padding"] < 0.5
    dev = read_speech(whole.data).dev
    for run, one in zip(runs, records, strict=True):
        model = SpeechTask.load(RunDirectory(run), torch.device("cpu"))
        norm: Any = model.rnn.norm_l0
        found = []
        for i, length in enumerate(dev.lengths):
            x = (dev.features(i, 0, length) - model.mean) * model.scale
            rows = (x @ model.rnn.weight_ih_l0.t()).detach().double().numpy()
            deviation = norm.running_var.sqrt().numpy()
            away = np.abs(rows.mean(0) - norm.running_mean.numpy()) / deviation
            found.append((away.mean(), np.abs(np.log(rows.std(0) / deviation)).mean()))
        expected = np.mean(found, axis=0)
        np.testing.assert_allclose(one["alone"]["rnn.norm_l0"], expected, rtol=1e-4)
        assert one["valid"].keys() == {"running", "recalibrated", "batch"}
        assert one["training"].keys() == one["alone"].keys()
    # A second spread of lengths, when the runs of the first are gone: what was kept of those stays.
    run_tiny(replace(whole, train=replace(whole.train, pool=1)), tmp_path / "second")
    main([*map(str, (tmp_path / "second", runs[0])), *where])
    both = json.loads(output.read_text())
    assert [one["pool"] for one in both] == [1, 2, 2]
    assert both[1:] == records
    # Another seed has other batches, and another share of padding: the same row all the same.
    other = {**records[0], "seed": 2, "padding": records[0]["padding"] + 0.05}
    assert [row[1] for row in table([*records, other]).rows] == ["2", "1"]
