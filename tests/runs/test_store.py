"""Run directories: whole files or none, and nobody else's checkpoints."""

import errno
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import normrnn
from normrnn.errors import UserError
from normrnn.recipes import recipe
from normrnn.recipes.text import ptb_small
from normrnn.runs.metrics import MetricsFile
from normrnn.runs.store import RunDirectory, changed_fields
from normrnn.text.config import LanguageConfig
from tests.tiny_runs import run_tiny

CONFIG = recipe("ptb-small")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A directory with a config."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    directory.write_config(CONFIG)
    return directory


def test_config_round_trip(run: RunDirectory) -> None:
    assert run.config() == CONFIG
    values = json.loads((run.path / "config.json").read_text())
    assert (values["recipe"], values["norm"]) == ("ptb-small", "none")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_full_disk_leaves_the_old_file(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    run.write("model.safetensors", b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = (os, "fsync") if failing == "fsync" else (Path, "replace")
    monkeypatch.setattr(*target, full)
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
    assert run.read_checkpoint(CONFIG) is None
    run.write_checkpoint({"model": {"w": torch.arange(3)}, "finished": 0}, CONFIG)
    payload = run.read_checkpoint(replace(CONFIG, epochs=99, data="elsewhere"))
    assert payload is not None
    assert torch.equal(payload["model"]["w"], torch.arange(3))


def test_two_names_of_one_checkpoint(run: RunDirectory) -> None:
    """As a kill leaves them between the two steps of a write: a rename keeps both."""
    run.write_checkpoint({"finished": 0}, CONFIG)
    os.link(run.path / "checkpoint.pt", run.path / "checkpoint.previous.pt")
    run.write_checkpoint({"finished": 1}, CONFIG)
    assert sorted(path.name for path in run.path.iterdir()) == [
        "checkpoint.previous.pt",
        "checkpoint.pt",
        "config.json",
    ]
    payload = run.read_checkpoint(CONFIG)
    assert payload is not None
    assert payload["finished"] == 1


def test_truncated_checkpoint(run: RunDirectory) -> None:
    run.write_checkpoint({"model": {"w": torch.arange(1000)}}, CONFIG)
    content = run.read("checkpoint.pt")
    for size in (0, 10, len(content) // 2, len(content) - 1):
        run.write("checkpoint.pt", content[:size])
        with pytest.raises(UserError, match=r"checkpoint\.pt (cannot be read|is damaged)"):
            run.read_checkpoint(CONFIG)


class _Trap:
    """What a hostile checkpoint would run on loading."""

    def __reduce__(self):
        return (os.mkdir, ("sprung",))


def test_foreign_checkpoints(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.path)
    for content in (pickle.dumps(_Trap()), b"hello"):
        run.write("checkpoint.pt", content)
        with pytest.raises(UserError, match="cannot be read"):
            run.read_checkpoint(CONFIG)
    assert not (run.path / "sprung").exists()
    torch.save({"state_dict": {}}, run.path / "checkpoint.pt")
    with pytest.raises(UserError, match="not a checkpoint of this program"):
        run.read_checkpoint(CONFIG)
    run.write_checkpoint({}, replace(CONFIG, seed=4))
    with pytest.raises(UserError, match="belongs to another run: seed was 4, is now 1"):
        run.read_checkpoint(CONFIG)


def test_only_one_process_trains(run: RunDirectory) -> None:
    with (
        run.locked(),
        pytest.raises(UserError, match="another process is training"),
        RunDirectory(run.path).locked(),
    ):
        pass
    with run.locked():
        pass


def test_strange_directories_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("somebody's")
    with pytest.raises(UserError, match=r"has a model\.safetensors but no config\.json"):
        RunDirectory(tmp_path).create()
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(UserError, match="a file is in the way"):
        RunDirectory(file).create()
    assert file.read_text() == "x"


def test_changed_fields_in_words() -> None:
    assert changed_fields(CONFIG, replace(CONFIG, epochs=20, data="x")) == ""
    assert changed_fields(CONFIG, replace(CONFIG, seed=3)) == "seed was 1, is now 3"
    assert changed_fields(CONFIG, recipe("ptb-large")).startswith("recipe was ptb-small")
    assert "model" not in changed_fields(CONFIG, recipe("ptb-large"))
    assert changed_fields(CONFIG, replace(CONFIG, data_sha256="1")) == "the data has changed"


def test_the_norms_own_gamma_is_the_same_as_its_number() -> None:
    """Runs from before None was the default have the number, and go on."""
    number = replace(ptb_small(), model=replace(ptb_small().model, gamma=1.0))
    assert changed_fields(number, CONFIG) == ""
    assert changed_fields(CONFIG, number) == ""
    a, b = (replace(config, norm="recurrent") for config in (number, CONFIG))
    assert changed_fields(a, b) == "model.gamma was 1.0, is now None"


def test_metrics_file_is_cut_and_never_stretched(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.cut(0)
    metrics.append({"loss": 1.0})
    size = metrics.size()
    metrics.append({"loss": 2.0})
    metrics.cut(size)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"loss": 1.0}\n'
    with pytest.raises(UserError, match="rows are missing"):
        metrics.cut(size + 1)


def test_a_model_is_hashed_once(
    tiny: LanguageConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_tiny(replace(tiny, epochs=1), tmp_path / "run")
    reads: list[str] = []
    read = RunDirectory.read

    def counted(directory: RunDirectory, name: str) -> bytes:
        reads.append(name)
        return read(directory, name)

    monkeypatch.setattr(RunDirectory, "read", counted)
    normrnn.export(tmp_path / "run", tmp_path / "m.pt")
    assert reads.count("model.safetensors") == 1
