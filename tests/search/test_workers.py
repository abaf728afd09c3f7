"""Real runs on real storages; one command is killed half way."""

import json
import math
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna import TrialPruned
from optuna.trial import TrialState

from normrnn.config.base import Config
from normrnn.engine.start import open_experiment
from normrnn.errors import UserError
from normrnn.experiments.search.study import SLOT, Plan, Study
from normrnn.experiments.search.worker import Worker, result
from normrnn.recipes import read_config
from normrnn.runs.rows import read_rows
from normrnn.runs.store import RunDirectory
from normrnn.speech.config import SpeechConfig
from tests.search.postgres import server
from tests.tiny_runs import rows_of, run_tiny


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A storage of each kind."""
    is_file = request.param == "sqlite"
    with nullcontext(f"sqlite:///{tmp_path}/study.db") if is_file else server() as url:
        yield url


@pytest.fixture
def worker(tmp_path: Path, tiny_plan: Plan) -> Iterator[Callable[..., Worker]]:
    """A worker of a new study."""
    studies: list[Study] = []

    def make(plan: Plan = tiny_plan, count: int = 1) -> Worker:
        url = f"sqlite:///{tmp_path}/study.db"
        studies.append(Study("s", url, plan, count, 1))
        return Worker(studies[-1], tmp_path / "out")

    yield make
    for one in studies:
        one.close()


def test_trials_of_a_killed_command_are_run_again(
    flags: Callable[..., list[str]], tiny_plan: Plan, tmp_path: Path, storage: str
) -> None:
    """A command that joins runs them to their end, from their checkpoints."""
    trials, out = 3, tmp_path / "out"
    words = [*flags(trials=trials, storage=storage, study="s", workers=2, out=out)]
    victim = subprocess.Popen([sys.executable, "-m", "normrnn.cli", *words])
    deadline = time.monotonic() + 200
    checkpoint = out / "trials" / "0000" / "none" / "checkpoint.pt"
    while not checkpoint.exists():
        assert victim.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    done = subprocess.run([sys.executable, "-m", "normrnn.cli", *words], timeout=300, check=False)
    assert done.returncode == 0
    with closing(Study("s", storage, tiny_plan, trials)) as study:
        rows, failed = study.rows(), study.trials(TrialState.FAIL)
    assert failed
    for trial in failed:  # drawn once, also where another command runs it
        assert trial.params in ({}, rows[trial.user_attrs[SLOT]]["settings"])
    assert [row["trial"] for row in rows] == list(range(trials))
    assert len({json.dumps(row["settings"]) for row in rows}) == trials
    for row in rows:
        assert row["arms"].keys() == {"none", "hidden"}
        assert row["value"] == min(arm["loss"] for arm in row["arms"].values())
        for arm, found in row["arms"].items():
            run = out / "trials" / f"{row['trial']:04d}" / arm
            metrics = read_rows(run)
            updates = Counter(r["updates"] for r in metrics if r["split"] == "train")
            assert set(updates.values()) == {1}
            batch = row["settings"]["train.batch"]
            assert found["updates"] == 6000 // (12 * batch)
            assert found["count"] == found["updates"] * 12 * batch
            valid = [r for r in metrics if r["split"] == "valid" and r["statistics"] == "running"]
            assert found["loss"] == found["final"] == valid[-1]["loss"]


class FakeTrial:
    """Records what a pruner gets, and prunes at some steps."""

    def __init__(self, pruned_at: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.pruned_at, self.user_attrs = pruned_at, {SLOT: 0}
        self.reports: list[tuple[int, float]] = []

    def report(self, value: float, step: int) -> None:
        self.reports.append((step, value))

    def should_prune(self) -> bool:
        return self.reports[-1][0] in self.pruned_at

    def suggest_float(self, *_: Any, **__: Any) -> float:
        return 0.05

    def suggest_categorical(self, _: str, values: Any) -> Any:
        return values[0]


def _run(worker: Worker, config: Config, out: Path, trial: FakeTrial | None = None) -> dict:
    return worker._run(trial, config, out, 1000)  # type: ignore[arg-type]


def test_a_resumed_run_reports_new_validations(
    worker: Callable[..., Worker], tiny_plan: Plan, tmp_path: Path
) -> None:
    """With the threads it began with: another worker may have others."""
    config: Any = tiny_plan.config
    config = replace(config, norm="frame", train=replace(config.train, epoch_tokens=2000))
    run_tiny(config, tmp_path / "run")
    trial = FakeTrial()
    _run(worker(), replace(config, epochs=2, threads=2), tmp_path / "run", trial)
    rows = rows_of(tmp_path / "run")
    losses = [r["loss"] for r in rows if r["split"] == "valid" and r["statistics"] == "running"]
    assert len(losses) == 2
    assert trial.reports == [(1001, min(losses))]
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (saved["epochs"], saved["threads"]) == (2, 1)


@pytest.mark.parametrize("pruned", [(), ("none",), ("hidden",), ("none", "hidden")])
def test_a_setting_is_pruned_for_all_variants_or_for_none(
    worker: Callable[..., Worker],
    tiny_plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
    pruned: tuple[str, ...],
) -> None:
    plan: Any = replace(tiny_plan, config=replace(tiny_plan.config, epochs=2))
    plan = replace(plan, config=replace(plan.config, train=replace(plan.config.train, segments=3)))
    one, trial, calls = worker(plan), FakeTrial(), []

    def run(pruner: object, config: Config, _: Path, first: int) -> dict[str, Any]:
        calls.append((config.norm, first, pruner is not None))
        if pruner is not None and config.norm in pruned:
            raise TrialPruned
        return {"diverged": False, "loss": 1.0, "norm": config.norm}

    monkeypatch.setattr(one, "_run", run)
    if len(pruned) == 2:
        with pytest.raises(TrialPruned):
            one.run_trial(trial)  # type: ignore[arg-type]
        return
    found = one.run_trial(trial)  # type: ignore[arg-type]
    assert [arm["norm"] for arm in found.values()] == list(found) == ["none", "hidden"]
    again = [("none", 0, False)] if pruned == ("none",) else []
    # A variant that follows one that trained is not pruned: both have the same budget.
    assert calls == [("none", 0, True), ("hidden", 6, pruned == ("none",)), *again]


def test_speech_too(
    worker: Callable[..., Worker], tiny_speech: SpeechConfig, tmp_path: Path
) -> None:
    """Another kind of recipe, fields of its own, a sampler and a pruner."""
    found = open_experiment(tiny_speech)
    config = replace(tiny_speech, epochs=1, norm="none", data_sha256=found.sha256)
    space = {
        "optimizer.lr": {"low": 1e-3, "high": 0.1, "log": True},
        "model.bidirectional": [True, False],
        "model.hidden": {"low": 2, "high": 4},
    }
    one = worker(Plan(config, space, ("none", "sequence"), "tpe", "median"), 1)
    one.work()
    (row,) = one.study.rows()
    assert row["state"] == "complete"
    for arm, found in row["arms"].items():
        run = tmp_path / "out" / "trials" / "0000" / arm
        valid = [r["loss"] for r in rows_of(run) if r["split"] == "valid"]
        assert (found["loss"], found["final"]) == (min(valid), valid[-1])
        assert found["diverged"] is (valid[-1] > 2 * math.log(7))
        saved = read_config(json.loads((run / "config.json").read_text()))
        assert isinstance(saved, SpeechConfig)
        assert saved.norm == arm
        assert saved.model.hidden == row["settings"]["model.hidden"]
        assert saved.model.bidirectional is row["settings"]["model.bidirectional"]


@pytest.mark.parametrize(
    ("lr", "diverged", "reason"), [(0.05, False, ""), (1e38, True, "at update"), (30.0, True, "13")]
)
def test_divergence_is_a_result(
    worker: Callable[..., Worker],
    tiny_plan: Plan,
    tmp_path: Path,
    lr: float,
    diverged: bool,
    reason: str,
) -> None:
    """Not finite; or worse than twice log 13, the uniform guess over the symbols of this text."""
    config: Any = tiny_plan.config
    config = replace(config, optimizer=replace(config.optimizer, lr=lr))
    trial = FakeTrial()
    found = _run(worker(), config, tmp_path / "run", trial)
    assert found["diverged"] is diverged
    assert reason in found.get("reason", "")
    if lr > 100:
        assert (found["loss"], trial.reports) == (None, [])
    else:
        assert trial.reports == [(1000, found["loss"])]
        assert found == result(tmp_path / "run")
        assert (found["final"] > 2 * 2.5649) is diverged


def test_a_setting_that_cannot_be_run_stops_no_other(
    worker: Callable[..., Worker], tiny_plan: Plan
) -> None:
    one = worker(replace(tiny_plan, space={"train.batch": [8, 10**6]}, norms=("none",)), 4)
    one.work()
    done = {row["trial"]: row["settings"]["train.batch"] for row in one.study.rows()}
    assert set(done.values()) == {8}
    assert set(one.failed) == set(range(4)) - done.keys()
    assert all("1000000" in text for text in one.failed.values())


def test_a_run_that_another_process_trains_is_waited_for(
    worker: Callable[..., Worker], tiny_plan: Plan, tmp_path: Path
) -> None:
    """Its worker counts as dead, but is alive: its directory is locked."""
    one = worker(replace(tiny_plan, norms=("none",), space={"train.batch": [8]}))
    run = tmp_path / "out" / "trials" / "0000" / "none"
    config: Any = tiny_plan.config
    run_tiny(replace(config, train=replace(config.train, batch=8)), run)
    with RunDirectory(run).locked():
        one.stopping.wait = lambda _: one.stopping.set()  # type: ignore[method-assign]
        one.work()
    assert (one.study.rows(), one.failed) == ([], {})
    one.stopping.clear()
    one.work()
    assert [row["trial"] for row in one.study.rows()] == [0]


def test_several_processes_train_a_run(
    worker: Callable[..., Worker], tiny_plan: Plan, tmp_path: Path
) -> None:
    one = worker()
    one.processes = 2
    assert _run(one, tiny_plan.config, tmp_path / "run")["diverged"] is False
    assert RunDirectory(tmp_path / "run").config().epochs == 1
    config: Any = tiny_plan.config
    config = replace(config, train=replace(config.train, batch=10**6))
    with pytest.raises(UserError, match="1000000"):
        _run(one, config, tmp_path / "bad")
