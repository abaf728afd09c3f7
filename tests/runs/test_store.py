"""Run directories: whole files or none, and nobody else's checkpoints."""

import errno
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from normrnn.config.base import Config
from normrnn.config.jsonio import to_dict
from normrnn.errors import UserError
from normrnn.files import BLANK, read_json, sealed_json
from normrnn.ops.native.library import describe
from normrnn.recipes import recipe
from normrnn.runs import records
from normrnn.runs.environment import record
from normrnn.runs.records import MetricsFile, Note, read_note, read_rows
from normrnn.runs.store import RunDirectory, sealed_tensors

CONFIG = recipe("ptb-small")


def note(config: Config = CONFIG, finished: int = 0) -> Note:
    state = {"updates": 2, "best_updates": 1, "model_sha256": "m", "finished": finished}
    return Note(to_dict(config), "r", **state)


def changed(old: Config, new: Config) -> str:
    return records.changed_fields(to_dict(old), to_dict(new))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A directory with a config."""
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.write("config.json", json.dumps(to_dict(CONFIG)).encode())
    return directory


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_full_disk_leaves_the_old_file(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    run.write("model.safetensors", b"old")

    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(os if failing == "fsync" else Path, failing, full)
    with pytest.raises(UserError, match="No space left on device"):
        run.write("model.safetensors", b"new and longer")
    monkeypatch.undo()
    assert run.read("model.safetensors") == b"old"
    assert not list(run.path.glob(".*.tmp"))


def test_full_disk_under_metrics(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.metrics, "path", Path("/dev/full"))
    with pytest.raises(UserError, match="No space left on device"):
        run.metrics.append({"loss": 1.0})


def test_checkpoint_round_trip(run: RunDirectory) -> None:
    assert run.read_checkpoint() is None
    run.write_checkpoint({"model": {"w": torch.arange(3)}}, note())
    found = read_note(run.path)
    assert found is not None
    assert replace(found, archive_sha256="") == note()
    longer = replace(CONFIG, epochs=99, data="elsewhere")
    run.write("config.json", json.dumps(to_dict(longer)).encode())
    payload = run.read_checkpoint()
    assert payload is not None
    assert torch.equal(payload["model"]["w"], torch.arange(3))


def test_tied_weights_and_metadata_that_looks_like_a_checksum(run: RunDirectory) -> None:
    tied = torch.arange(6.0).view(2, 3)
    for text in ("", f'"sha256": "{BLANK}"'):
        content, digest = sealed_tensors({"a": tied, "b": tied, "c": tied.T}, {"config": text})
        run.write("model.safetensors", content)
        tensors, metadata = run.read_model()
        torch.testing.assert_close(tensors, {"a": tied, "b": tied, "c": tied.T})
        assert (metadata["sha256"], metadata["config"]) == (digest, text)


def test_settings_that_look_like_a_checksum_and_settings_that_are_too_long(tmp_path: Path) -> None:
    settings = {"sha256": "ab" * 32, "d": {"sha256": "x"}}
    (tmp_path / "config.json").write_text(json.dumps({"settings": settings}))
    assert read_json(tmp_path / "config.json") == ({"settings": settings}, False)
    records.write_note(tmp_path, Note({"settings": settings, "long": "x" * 64_000}))
    found = read_note(tmp_path)
    assert found is not None
    assert found.config["settings"] == settings
    with pytest.raises(UserError, match="64,512"):
        Note({"long": "x" * 65_500})


def test_which_model_belongs_to_a_checkpoint() -> None:
    def owns(run: str, updates: int, sha256: str = "", finished: int = 0) -> bool:
        header = {"run": run, "updates": str(updates), "sha256": sha256}
        return note(finished=finished).owns(header)

    assert owns("r", 1)
    assert owns("r", 2)  # newer: killed between two writes
    assert not owns("r", 3)
    assert not owns("s", 1)
    assert owns("r", 1, "m", finished=4)
    assert not owns("r", 1, "n", finished=4)


def test_foreign_checkpoints(run: RunDirectory) -> None:
    torch.save({"state_dict": {}}, run.path / "theirs")
    run.write_checkpoint({"model": {"w": torch.arange(1000)}}, note())
    whole = run.read("checkpoint.pt")
    cut = [whole[:size] for size in (0, 10, len(whole) // 2, len(whole) - 1)]
    for content in (b"hello", run.read("theirs"), *cut):
        run.write("checkpoint.pt", content)
        with pytest.raises(UserError, match=r"checkpoint\.pt"):
            run.read_checkpoint()
        archive = io.BytesIO(b"  " + content)
        records.append_note(archive, note())
        run.write("checkpoint.pt", archive.getvalue())
        with pytest.raises(UserError, match=r"checkpoint\.pt"):
            run.read_checkpoint()
    run.write_checkpoint({}, note(replace(CONFIG, seed=4)))
    with pytest.raises(UserError, match="seed was 4, is now 1"):
        run.read_checkpoint()


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(UserError, match="a file is in the way"), RunDirectory(file).locked():
        pass
    assert file.read_text() == "x"


def test_changed_fields_in_words() -> None:
    assert changed(CONFIG, replace(CONFIG, epochs=20, data="x")) == ""
    assert changed(CONFIG, replace(CONFIG, seed=3)) == "seed was 1, is now 3"
    assert changed(CONFIG, recipe("ptb-large")).startswith("recipe was ptb-small")
    assert "model" not in changed(CONFIG, recipe("ptb-large"))
    assert changed(CONFIG, replace(CONFIG, data_sha256="1")) == "the data has changed"


def test_metrics_file_is_cut_and_never_stretched(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.truncate()
    metrics.append({"loss": 1.0})
    size, sha256 = metrics.size, metrics.sha256
    metrics.append({"loss": 2.0})
    state = replace(note(), metrics_bytes=size, metrics_sha256=sha256, resume_bytes=size)
    metrics.resume(state)
    metrics.truncate()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"loss": 1.0}\n'
    assert metrics.sha256 == sha256
    with pytest.raises(UserError, match="is damaged"):
        metrics.resume(replace(state, metrics_bytes=size + 1))


ROW = {"split": "train", "updates": 1, "epoch": 1, "loss": 1.0, "count": 2, "seconds": 0.5}


def test_rows_are_parsed_again_only_if_they_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_rows(tmp_path) == []
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(ROW)
    parsed: list[str] = []
    loads = json.loads
    monkeypatch.setattr("json.loads", lambda text: parsed.append(text) or loads(text))
    for _ in range(3):
        read_rows(tmp_path).clear()
    changed = metrics.path.stat().st_mtime_ns
    metrics.append({**ROW, "updates": 2})
    os.utime(metrics.path, ns=(changed, changed))  # as on a disk with coarse times
    assert [row["updates"] for row in read_rows(tmp_path)] == [1, 2]
    assert len(parsed) == 3


def test_a_line_that_is_no_row(tmp_path: Path) -> None:
    wrong = {"loss": float("nan"), "updates": True, "count": 0, "grad_norm": "1", "split": 3}
    for key, value in [*wrong.items(), ("loss", 1e301), ("statistics", None), ("saved", 1)]:
        (tmp_path / "metrics.jsonl").write_text(json.dumps({**ROW, key: value}) + "\n")
        found = records.read_metrics(tmp_path)
        assert (found.rows, "line 1" in found.problem) == ([], True), key


def test_a_run_notes_every_machine_once_and_tells_other_kernels(tmp_path: Path) -> None:
    run, file = RunDirectory(tmp_path), tmp_path / records.ENVIRONMENT
    assert record(run)
    assert record(run)
    ((first,), verified) = read_json(file, list)
    assert verified
    assert first["torch"].startswith("2.")
    assert first["recurrence"] == describe()
    file.write_bytes(sealed_json([{**first, "cpu": "another", "recurrence": {"kernels": "sse"}}]))
    assert not record(run)
    assert record(run)
    assert [e["cpu"] for e in read_json(file, list)[0]] == ["another", first["cpu"]]
    file.write_text("{")
    record(run)
    assert read_json(file, list) == ([first], True)
