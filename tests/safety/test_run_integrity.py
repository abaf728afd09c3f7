"""Nothing damaged is believed: checkpoints, weights, rows and configs of runs."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import normrnn
from normrnn.deploy.card import info
from normrnn.engine.loop import Interrupted
from normrnn.errors import UserError
from normrnn.experiments.training import evaluate
from normrnn.reporting.runs import load as read_run
from normrnn.runs import records
from normrnn.runs.records import Note
from normrnn.runs.store import RunDirectory
from normrnn.text.config import LanguageConfig
from tests.tiny_runs import rows_of, run_tiny


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_refused(tiny_frame: LanguageConfig, stopped: Path) -> None:
    name = "checkpoint.pt"
    good = (stopped / name).read_bytes()
    for seed in range(20):
        flip(stopped / name, random.Random(seed))
        before = {path.name: path.read_bytes() for path in stopped.iterdir()}
        with pytest.raises(UserError, match=name):
            run_tiny(tiny_frame, stopped)
        assert {path.name: path.read_bytes() for path in stopped.iterdir()} == before
        read_run(stopped)
        (stopped / name).write_bytes(good)
    (stopped / name).unlink()
    with pytest.raises(UserError, match=name):
        run_tiny(tiny_frame, stopped)


def test_damaged_weights_are_not_used(whole: Path) -> None:
    name = "model.safetensors"
    good, expected = (whole / name).read_bytes(), evaluate(whole)
    for seed in range(40):
        flip(whole / name, random.Random(seed))
        with pytest.raises(UserError, match=name):
            evaluate(whole)
        (whole / name).write_bytes(good)
    assert evaluate(whole) == expected


def test_damaged_rows(tiny_frame: LanguageConfig, stopped: Path, whole: Path) -> None:
    for path, use in ((stopped, partial(run_tiny, tiny_frame)), (whole, read_run)):
        good = (path / "metrics.jsonl").read_bytes()
        for seed in range(20):
            flip(path / "metrics.jsonl", random.Random(seed))
            for reader in (read_run, use):
                with pytest.raises(UserError, match=r"metrics\.jsonl"):
                    reader(path)
            (path / "metrics.jsonl").write_bytes(good)
        read_run(path)


def edit(key: str, value: object) -> Callable[[dict], None]:
    def change(config: dict) -> None:
        *parents, last = key.split(".")
        reduce(dict.__getitem__, parents, config)[last] = value

    return change


def test_an_edited_config_is_refused_by_what_changed(
    tiny_frame: LanguageConfig, stopped: Path, whole: Path
) -> None:
    changes = {
        "seed was 1, is now 3": edit("seed", 3),
        "model.eps was 1e-05, is now 0.001": edit("model.eps", 1e-3),
        "the data has changed": edit("data_sha256", "00"),
    }
    for path, use in ((stopped, lambda p: run_tiny(tiny_frame, p)), (whole, evaluate)):
        good = (path / "config.json").read_text()
        for said, change in changes.items():
            config = json.loads(good)
            change(config)
            (path / "config.json").write_text(json.dumps(config))
            with pytest.raises(UserError, match=said):
                use(path)


def test_extending_a_finished_run_never_looks_damaged(
    tiny_frame: LanguageConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped right after the test rows were cut, it can be read and goes on."""
    out, longer = tmp_path / "run", tmp_path / "longer"
    run_tiny(replace(tiny_frame, epochs=1), out)
    rows = len(read_run(out).rows)

    with monkeypatch.context() as patch:
        killed = Mock(side_effect=SystemExit)
        patch.setattr("normrnn.engine.loop.record", killed)  # comes after the cut
        with pytest.raises(SystemExit):
            run_tiny(replace(tiny_frame, epochs=2), out)
    assert 0 < len(read_run(out).rows) < rows
    run_tiny(replace(tiny_frame, epochs=2), out)
    run_tiny(replace(tiny_frame, epochs=2), longer)
    assert rows_of(out) == rows_of(longer)


@pytest.mark.parametrize("written", ["[" * 5000, "no JSON"])
def test_weights_with_a_config_that_is_none(written: str, whole: Path) -> None:
    """Made by hand, with a right checksum, and no checkpoint that knows better."""
    (whole / "checkpoint.pt").unlink()
    directory = RunDirectory(whole)
    directory.write_model(directory.read_model()[0], {"config.json": written})
    with pytest.raises(UserError, match="is damaged"):
        evaluate(whole)


def test_a_model_of_another_run(
    tiny_frame: LanguageConfig, stopped: Path, whole: Path, tmp_path: Path
) -> None:
    """Another seed; the same settings, trained again; the same run, older; none."""
    other, again = tmp_path / "other", tmp_path / "again"
    for out, seed in ((other, 2), (again, 1)):
        with pytest.raises(Interrupted):
            run_tiny(replace(tiny_frame, seed=seed), out, stop_at=45)
    own = (stopped / "model.safetensors").read_bytes()
    for stranger in (other, again):
        shutil.copy(stranger / "model.safetensors", stopped)
        before = (stopped / "metrics.jsonl").read_bytes()
        for use in (lambda: run_tiny(tiny_frame, stopped), lambda: normrnn.load(stopped)):
            with pytest.raises(UserError, match=r"model\.safetensors does not belong"):
                use()
        assert (stopped / "metrics.jsonl").read_bytes() == before
    (stopped / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors"):
        run_tiny(tiny_frame, stopped)
    (stopped / "model.safetensors").write_bytes(own)
    run_tiny(tiny_frame, stopped)
    assert rows_of(stopped) == rows_of(whole)
    (stopped / "model.safetensors").write_bytes(own)  # of its first validation
    for use in (evaluate, normrnn.load, info):
        with pytest.raises(UserError, match=r"model\.safetensors does not belong"):
            use(stopped)
    (stopped / "checkpoint.pt").unlink()  # then the config in the header of the model decides
    shutil.copy(other / "model.safetensors", stopped)
    with pytest.raises(UserError, match="seed"):
        info(stopped)


def test_a_model_that_is_newer_than_the_checkpoint(
    tiny_frame: LanguageConfig, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the two: it can be used, and the run resumes."""
    out = tmp_path / "run"

    def killed(*given: object) -> str:
        write(*given)  # type: ignore[arg-type]
        raise SystemExit

    with monkeypatch.context() as patch:
        write = RunDirectory.write_model
        patch.setattr(RunDirectory, "write_model", killed)
        with pytest.raises(SystemExit):
            run_tiny(tiny_frame, out)
    normrnn.load(out)
    run_tiny(tiny_frame, out)
    assert rows_of(out) == rows_of(whole)


def test_rows_appended_to_a_finished_run(whole: Path) -> None:
    row = json.dumps(rows_of(whole)[-1] | {"loss": 1.0, "seconds": 99.0})
    with (whole / "metrics.jsonl").open("a") as file:
        file.write(f"{row}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        read_run(whole)


@pytest.mark.parametrize("part", ["state", "best_running", "model", "sums"])
def test_a_checkpoint_that_does_not_fit(
    part: str, tiny_frame: LanguageConfig, stopped: Path
) -> None:
    payload = torch.load(stopped / "checkpoint.pt", weights_only=True)
    if part == "state":
        payload["task"]["state"] = tuple(s[:, :3] for s in payload["task"]["state"])
    else:
        payload[part] = {"nonsense": 1}
    config = json.loads((stopped / "config.json").read_text())
    note = Note(config)
    RunDirectory(stopped).write_checkpoint(payload, note)
    with pytest.raises(UserError, match="the checkpoint does not fit this network or its data"):
        run_tiny(tiny_frame, stopped)


def test_rows_that_change_while_they_are_read(
    tiny_frame: LanguageConfig, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run is trained for longer between two looks of a reader: not damaged."""
    reading, first = records.files.read_regular, []

    def late(path: Path, *limit: int) -> bytes:
        if not first:
            first.append(path)
            with pytest.raises(Interrupted):  # without the rows of the test set, not yet the others
                run_tiny(replace(tiny_frame, epochs=9), whole, stop_at=170)
        return reading(path, *limit)

    monkeypatch.setattr(records.files, "read_regular", late)
    found = records.read_metrics(whole)
    assert first
    assert (found.problem, found.verified) == ("", True)


def test_weights_are_read_once(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, read = [], RunDirectory.read
    monkeypatch.setattr(
        RunDirectory, "read", lambda run, name: names.append(name) or read(run, name)
    )
    evaluate(whole)
    normrnn.export(whole, tmp_path / "model")
    assert names == ["model.safetensors"] * 2
