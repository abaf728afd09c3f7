"""Several processes train as one: losses, parameters, statistics, and what goes wrong."""

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from normrnn.config.base import Config
from normrnn.engine.ranks import process_group
from normrnn.errors import UserError
from normrnn.experiments.training import evaluate
from normrnn.speech.config import SpeechConfig
from normrnn.text.config import LanguageConfig
from tests.tiny_runs import note_of, rows_of, run_tiny
from tests.torchrun import checkpoint, command, environment, torchrun, workers


def without_dropout(config: LanguageConfig) -> LanguageConfig:
    """Masks of several processes are others than those of one."""
    return replace(config, epochs=2, model=replace(config.model, dropout=0.0))


def calm(config: Config) -> Config:
    """Layer normalisation magnifies the last bits of a zero state some 300 times a step: with small
    steps the last digits of two runs stay together for two epochs."""
    if config.norm != "layer":
        return config
    return replace(config, optimizer=replace(config.optimizer, lr=1e-4))


def same(one: Path, several: Path, tol: float = 4e-4) -> None:
    """Rows, parameters and running statistics, to float tolerance."""
    rows, found = rows_of(one), rows_of(several)
    assert len(rows) == len(found)
    for row, other in zip(rows, found, strict=True):
        numbers = {name: value for name, value in row.items() if isinstance(value, float)}
        assert {name: other[name] for name in numbers} == pytest.approx(numbers, rel=tol), row
        assert {**other, **numbers} == row
    expected, actual = checkpoint(one), checkpoint(several)
    assert expected["model"].keys() == actual["model"].keys()
    for name, value in expected["model"].items():
        torch.testing.assert_close(actual["model"][name], value, rtol=tol, atol=tol, msg=name)


def check(config: Config, processes: int, where: Path) -> None:
    config = calm(config)
    run_tiny(config, where / "one")
    done = torchrun(processes, config, where / "several")
    assert done.returncode == 0, done.stderr
    assert f"{where / 'several'} is finished" in done.stdout
    assert done.stdout.count("is finished") == done.stdout.count("data: ") == 1
    same(where / "one", where / "several")


def test_two_processes_train_a_text_as_one(tiny_frame: LanguageConfig, tmp_path: Path) -> None:
    """Eight streams, four each; the validation text leaves a tail to some of them."""
    check(without_dropout(tiny_frame), 2, tmp_path)


CASES = [(norm, k) for norm in ("none", "sequence", "frame", "layer") for k in (2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "processes"), CASES)
@pytest.mark.parametrize("kind", ["streams", "sequences", "sum_over_time", "mean"])
def test_several_train_as_one(
    norm: str,
    processes: int,
    kind: str,
    tiny: LanguageConfig,
    tiny_speech: SpeechConfig,
    tmp_path: Path,
) -> None:
    """Speech in batches of five leaves one piece over: with three processes two have nothing."""
    if kind in ("streams", "sequences"):
        config = replace(without_dropout(tiny), train=replace(tiny.train, reading=kind))
    else:
        optimizer, train = replace(tiny_speech.optimizer, loss=kind), tiny_speech.train
        config = replace(tiny_speech, train=replace(train, batch=5), optimizer=optimizer)
    check(replace(config, norm=norm), processes, tmp_path)


def wait_for_rows(out: Path, count: int) -> None:
    for _ in range(1200):
        if (out / "metrics.jsonl").exists() and len(rows_of(out)) >= count:
            return
        time.sleep(0.05)
    raise AssertionError("no rows")


def start(config: Config, out: Path, *options: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command(2, config, out, *options), env=environment(), **pipes)


@pytest.fixture
def longer(tiny_frame: LanguageConfig) -> LanguageConfig:
    """With dropout, whose masks have to be those of the undisturbed run on every rank."""
    return replace(tiny_frame, epochs=6)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill 0", "kill 1", signal.SIGINT, signal.SIGTERM])
def test_what_was_stopped_or_killed_ends_as_the_undisturbed_run(
    what: str | signal.Signals, longer: LanguageConfig, tmp_path: Path
) -> None:
    """A killed worker restarts the group from the checkpoint; a signal ends all, with one line."""
    whole, out = tmp_path / "whole", tmp_path / "stopped"
    assert torchrun(2, longer, whole).returncode == 0
    process = start(longer, out, "--max-restarts", "3")
    wait_for_rows(out, 4)
    if isinstance(what, str):
        os.kill(workers(process.pid)[int(what[-1])], signal.SIGKILL)
    else:
        process.send_signal(what)
    said, err = process.communicate(timeout=300)
    if isinstance(what, str):
        assert process.returncode == 0, err
    else:
        assert process.returncode
        assert err.count("stopped; the same command resumes") == 1, err
        said = torchrun(2, longer, out).stdout
    assert "resuming" in said
    assert rows_of(whole) == rows_of(out)
    expected, actual = checkpoint(whole), checkpoint(out)
    assert all(torch.equal(v, actual["model"][k]) for k, v in expected["model"].items())


@pytest.mark.slow
def test_another_number_of_processes_resumes_and_says_so(
    tiny_frame: LanguageConfig, tmp_path: Path
) -> None:
    config, out = without_dropout(tiny_frame), tmp_path / "changed"
    run_tiny(config, tmp_path / "one")
    assert torchrun(3, replace(config, epochs=1), out).returncode == 0
    done = torchrun(2, config, out)
    assert done.returncode == 0, done.stderr
    assert "2 instead of 3 processes: resume is not bit-exact" in done.stdout
    same(tmp_path / "one", out)


def test_a_process_group_that_cannot_be_formed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"RANK": "0", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "nosuch"}
    for name, value in {**names, "NORMRNN_STORE": str(tmp_path / "store")}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="nosuch"), process_group(torch.device("cpu")):
        pass


@pytest.mark.slow
def test_an_error_on_any_rank_ends_all_with_one_sentence(
    tiny: LanguageConfig, tmp_path: Path
) -> None:
    few = {"train": replace(tiny.train, batch=2)}
    for processes, changes, said in (
        (2, {"norm": "hidden"}, "--train.no-sync-statistics"),
        (3, few, "train.batch 2 leaves less than 1 for each of 3 processes"),
        (2, {"data": str(tmp_path / "nowhere")}, "nowhere does not exist"),
    ):
        done = torchrun(processes, replace(tiny, **changes), tmp_path / "o", "--max-restarts", "2")
        assert done.returncode
        assert done.stderr.count("normrnn: ") >= 1, done.stderr
        assert said in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["frame", "hidden", "whiten", "sequence"])
def test_evaluations_are_of_whole_batches_also_where_updates_are_not(
    norm: str, tiny: LanguageConfig, tmp_path: Path
) -> None:
    """Those of one process that is given the same weights and running statistics. What cannot be
    pooled is trained."""
    train = replace(tiny.train, sync_statistics=False)
    model = replace(tiny.model, dropout=0.0, shrinkage=0.1)
    config = replace(tiny, norm=norm, train=train, epochs=2, model=model)
    out = tmp_path / "run"
    done = torchrun(2, config, out)
    assert done.returncode == 0, done.stderr
    best = note_of(out).best_updates
    validations = [row for row in rows_of(out) if row["split"] == "valid"]
    assert validations[-1]["loss"] < validations[0]["loss"]
    rows = [row for row in validations if row["updates"] == best]
    found = {r["statistics"]: r["loss"] for r in evaluate(out)["rows"] if r["split"] == "valid"}
    losses = {row["statistics"]: row["loss"] for row in rows}
    # A model saved with recalibrated statistics has no running ones.
    assert losses.keys() >= found.keys() >= {"recalibrated"}
    assert {kind: losses[kind] for kind in found} == pytest.approx(found, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["frame", "sequence", "hidden"])
def test_local_statistics_of_a_small_last_batch(
    norm: str, tiny_speech: SpeechConfig, tmp_path: Path
) -> None:
    """Twenty-three pieces in batches of seven leave two over, a part for one process alone, and
    these may come first."""
    train = replace(tiny_speech.train, sync_statistics=False, batch=7)
    for seed in (1, 2, 3):
        config = replace(tiny_speech, norm=norm, train=train, seed=seed, epochs=1)
        done = torchrun(3, config, tmp_path / str(seed))
        assert done.returncode == 0, done.stderr
