"""Stopped and resumed runs have the rows and weights of uninterrupted ones, bit for bit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from normrnn.engine.loop import Interrupted
from normrnn.errors import UsageError, UserError
from normrnn.text.config import LanguageConfig
from tests.tiny_runs import note_of, rows_of, run_tiny


def _same(a: Path, b: Path) -> None:
    assert rows_of(a) == rows_of(b)
    x, y = (torch.load(run / "checkpoint.pt", weights_only=True) for run in (a, b))
    assert (x["sums"], x["processes"]) == (y["sums"], y["processes"])
    torch.testing.assert_close(x["model"], y["model"], rtol=0, atol=0)
    first, second = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.fixture
def whole(tiny_frame: LanguageConfig, tmp_path: Path) -> Path:
    """An uninterrupted run."""
    run_tiny(tiny_frame, tmp_path / "whole")
    return tmp_path / "whole"


def test_ctrl_c_at_any_update(tiny_frame: LanguageConfig, whole: Path, tmp_path: Path) -> None:
    epoch = rows_of(whole)[-1]["updates"] // 3
    out = tmp_path / "stopped"
    # Inside a row, at a row's end, at a checkpoint, at the end of a segment and of an epoch.
    for stop_at in (1, 7, 10, 12, epoch // 2, epoch, epoch + 3, 3 * epoch - 1, 3 * epoch):
        with pytest.raises(Interrupted):
            run_tiny(tiny_frame, out, stop_at)
        assert note_of(out).updates == stop_at
    run_tiny(tiny_frame, out)
    _same(whole, out)


@pytest.mark.parametrize("norm", ["none", "recurrent"])
def test_masks_of_regularisers_are_resumed(
    tiny_frame: LanguageConfig, tmp_path: Path, norm: str
) -> None:
    masks = {"dropout": 0.3, "dropout_kind": "locked", "weight_drop": 0.3}
    model = replace(tiny_frame.model, **masks, zoneout_h=0.1, zoneout_c=0.2)
    config = replace(tiny_frame, norm=norm, model=model, epochs=1)
    run_tiny(config, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run_tiny(config, tmp_path / "stopped", 8)
    run_tiny(config, tmp_path / "stopped")
    _same(tmp_path / "whole", tmp_path / "stopped")


def test_rows_after_the_checkpoint_and_a_torn_line_are_cut(
    tiny_frame: LanguageConfig, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "torn"
    with pytest.raises(Interrupted):
        run_tiny(tiny_frame, out, stop_at=15)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"updates": 21, "split": "train", "loss": 1.0}\n{"updates": 28, "spl')
    run_tiny(tiny_frame, out)
    _same(whole, out)


def test_larger_number_of_epochs_extends(
    tiny_frame: LanguageConfig, whole: Path, tmp_path: Path
) -> None:
    out, before = tmp_path / "extended", (torch.get_num_threads(), torch.get_rng_state())
    run_tiny(replace(tiny_frame, epochs=1, threads=before[0] + 1), tmp_path / "threads")
    run_tiny(replace(tiny_frame, epochs=1), out)
    assert torch.get_num_threads() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert [row["split"] for row in rows_of(out)].count("test") == 3
    run_tiny(replace(tiny_frame, epochs=2), out)
    run_tiny(tiny_frame, out)
    _same(whole, out)
    config = json.loads((out / "config.json").read_text())
    assert (config["epochs"], config["shared_initialisation"]) == (3, True)


def test_a_finished_run_and_one_without_its_checkpoint_are_not_changed(
    tiny_frame: LanguageConfig, whole: Path
) -> None:
    before = {path: path.read_bytes() for path in whole.iterdir()}
    assert "is finished: 3 epochs" in run_tiny(tiny_frame, whole)[-1]
    assert {path: path.read_bytes() for path in whole.iterdir()} == before
    del before[whole / "checkpoint.pt"]
    (whole / "checkpoint.pt").unlink()
    with pytest.raises(UserError, match=r"a model\.safetensors but no checkpoint\.pt: not over"):
        run_tiny(tiny_frame, whole)
    assert {path: path.read_bytes() for path in whole.iterdir()} == before


def test_moved_data_is_the_same_data_changed_data_is_not(
    tiny_frame: LanguageConfig, whole: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    Path(tiny_frame.data).rename(moved)
    config = replace(tiny_frame, data=str(moved))
    assert "finished" in run_tiny(config, whole)[-1]
    with (moved / "train.txt").open("a") as file:
        file.write("one more line\n")
    read = json.loads((whole / "config.json").read_text())["data_sha256"]
    for settings, out in ((config, whole), (replace(config, data_sha256=read), tmp_path / "new")):
        with pytest.raises(UserError, match="data has changed"):
            run_tiny(settings, out)
    assert not (tmp_path / "new").exists()


def test_streams_that_begin_elsewhere_in_each_epoch(
    tiny_frame: LanguageConfig, whole: Path, tmp_path: Path
) -> None:
    config = replace(tiny_frame, train=replace(tiny_frame.train, shift_streams=True))
    run_tiny(config, tmp_path / "shifted")
    losses = [
        [r["loss"] for r in rows_of(out) if r["split"] == "train"]
        for out in (whole, tmp_path / "shifted")
    ]
    assert len(losses[0]) == len(losses[1])
    assert losses[0] != losses[1]
    epoch = rows_of(whole)[-1]["updates"] // 3
    with pytest.raises(Interrupted):
        run_tiny(config, tmp_path / "stopped", epoch + 3)
    run_tiny(config, tmp_path / "stopped")
    _same(tmp_path / "shifted", tmp_path / "stopped")
    with pytest.raises(UsageError, match="shift_streams"):
        replace(config, train=replace(config.train, reading="sequences"))
