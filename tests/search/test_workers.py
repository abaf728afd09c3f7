"""Real workers on real storages; one of them is killed half way."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from optuna import TrialPruned
from optuna.trial import TrialState

from normrnn.engine.interrupt import Interrupt, Interrupted
from normrnn.engine.start import open_experiment
from normrnn.errors import UserError
from normrnn.experiments.search.plan import Plan
from normrnn.experiments.search.study import ARMS, SLOT, Study
from normrnn.experiments.search.worker import Order, Pruning, run_arm, run_trial, work
from normrnn.processes import PARENT
from normrnn.recipes import read_config
from normrnn.runs.rows import read_rows
from normrnn.runs.store import BusyError
from normrnn.speech.config import SpeechConfig
from normrnn.text.config import LanguageConfig
from tests.search.postgres import server
from tests.tiny_runs import rows_of, run_tiny

TRIALS = 4


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A storage of each kind."""
    is_file = request.param == "sqlite"
    with nullcontext(f"sqlite:///{tmp_path}/study.db") if is_file else server() as url:
        yield url


def _start(
    order: Order, name: str, environment: Mapping[str, str] = MappingProxyType({})
) -> tuple[subprocess.Popen[bytes], Path]:
    log = Path(order.out) / name
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "normrnn.experiments.search.worker"],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment),
        )
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(order.send())
    return process, log


def _wait(process: subprocess.Popen[bytes], condition) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_killed_workers_trial_is_run_again(tiny_plan: Plan, tmp_path: Path, storage: str) -> None:
    with closing(Study("s", storage, tiny_plan, TRIALS, heartbeat=1)) as study:
        study.reclaim()
        order = Order("s", storage, TRIALS, 1, str(tmp_path / "out"), tiny_plan.to_json())
        _kill_one(order)
        _check(study, tmp_path / "out")


def _pause(process: subprocess.Popen[bytes], storage: str) -> None:
    """Stop it, but not while it writes to sqlite: nobody else could."""
    writing = Path(f"{storage.removeprefix('sqlite:///')}-journal")
    process.send_signal(signal.SIGSTOP)
    while writing.exists():
        process.send_signal(signal.SIGCONT)
        time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.05)


def _kill_one(order: Order) -> None:
    """Two workers; one ends in the middle of a trial, the other does what is left."""
    victim, log = _start(order, "victim.log")
    _wait(victim, lambda: "update 6  train" in log.read_text())
    _pause(victim, order.storage)  # or it would be done before the other has begun
    other, other_log = _start(order, "other.log")
    _wait(other, lambda: "trial" in other_log.read_text())
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    assert other.wait(timeout=300) == 0, other_log.read_text()


def _check(study: Study, out: Path) -> None:
    """All settings accounted for, none twice."""
    done = study.trials(TrialState.COMPLETE)
    assert sorted(t.user_attrs[SLOT] for t in done) == list(range(TRIALS))
    failed = study.trials(TrialState.FAIL)
    assert failed
    assert {t.state for t in study.trials()} == {TrialState.COMPLETE, TrialState.FAIL}
    again = {t.user_attrs[SLOT]: t for t in done}
    for trial in failed:
        # Marked, and the same setting was run once more.
        assert again[trial.user_attrs[SLOT]].params == trial.params
        assert again[trial.user_attrs[SLOT]].number > trial.number
    assert len({json.dumps(t.params) for t in done}) == TRIALS

    rows = study.rows()
    assert [row["trial"] for row in rows] == list(range(TRIALS))
    for row in rows:
        assert row["arms"].keys() == {"none", "hidden"}
        assert row["value"] == min(arm["loss"] for arm in row["arms"].values())
        for arm, found in row["arms"].items():
            run = out / "trials" / f"{row['trial']:04d}" / arm
            metrics = read_rows(run / "metrics.jsonl")
            # Resumed from its checkpoint: every update is there once.
            updates = Counter(r["updates"] for r in metrics if r["split"] == "train")
            assert set(updates.values()) == {1}
            batch = row["settings"]["train.batch"]
            assert found["updates"] == 6000 // (12 * batch)
            assert found["count"] == found["updates"] * 12 * batch
            valid = [r for r in metrics if r["split"] == "valid" and r["statistics"] == "running"]
            assert found["loss"] == found["final"] == valid[-1]["loss"]
    assert "resuming" in "".join(p.read_text() for p in out.glob("*.log"))


class _NoPruning:
    """What an arm needs of a trial."""

    def __init__(self) -> None:
        self.reported: list[float] = []
        self.steps: list[int] = []

    def report(self, value: float, step: int) -> None:
        self.steps.append(step)
        self.reported.append(value)

    def should_prune(self) -> bool:
        return False


def _arm(plan: Plan, out: Path, **optimizer: float):
    config = plan.config
    config = replace(config, optimizer=replace(config.optimizer, **optimizer))
    trial = _NoPruning()
    found = run_arm(config, out, Pruning(trial, 1000), lambda: None)  # type: ignore[arg-type]
    assert trial.steps == [1000 + k for k in range(len(trial.steps))]
    return found, trial.reported


@pytest.mark.parametrize("norm", ["none", "frame"])
def test_a_pruner_hears_of_every_validation(tiny_plan: Plan, tmp_path: Path, norm: Any) -> None:
    """Also of a run that goes on; under dropout, of the statistics that decide."""
    config = tiny_plan.config
    assert isinstance(config, LanguageConfig)
    config = replace(
        config,
        norm=norm,
        model=replace(config.model, dropout=0.25),
        train=replace(config.train, epoch_tokens=2000, segments=2),
    )
    run_tiny(config, tmp_path / "run")
    trial = _NoPruning()
    config = replace(config, epochs=2)
    run_arm(config, tmp_path / "run", Pruning(trial, 1000), lambda: None)  # type: ignore[arg-type]
    rows = rows_of(tmp_path / "run")
    losses = [r["loss"] for r in rows if r["split"] == "valid" and r["statistics"] == "running"]
    assert len(losses) == 4
    assert trial.steps == [1002, 1003]
    assert trial.reported == [min(losses[:3]), min(losses)]


class _Pruned(_NoPruning):
    """Stops the arms whose first step is in `hopeless`."""

    def __init__(self, hopeless: set[int]) -> None:
        super().__init__()
        self.hopeless = hopeless
        self.user_attrs: dict[str, Any] = {SLOT: 0}

    def should_prune(self) -> bool:
        return self.steps[-1] in self.hopeless

    def suggest_float(self, *_: Any, **__: Any) -> float:
        return 0.05

    def suggest_categorical(self, _: str, values: Any) -> Any:
        return values[0]

    def set_user_attr(self, name: str, value: Any) -> None:
        self.user_attrs[name] = value


@pytest.mark.parametrize("hopeless", [{0}, {2}, {0, 2}], ids=["first", "second", "both"])
def test_a_setting_is_pruned_for_all_arms_or_for_none(
    tiny_plan: Plan, tmp_path: Path, hopeless: set[int]
) -> None:
    plan = replace(tiny_plan, config=replace(tiny_plan.config, epochs=2))
    trial = _Pruned(hopeless)
    if len(hopeless) == 2:
        with pytest.raises(TrialPruned):
            run_trial(trial, plan, tmp_path, lambda: None)  # type: ignore[arg-type]
        assert ARMS not in trial.user_attrs
        return
    value = run_trial(trial, plan, tmp_path, lambda: None)  # type: ignore[arg-type]
    arms = trial.user_attrs[ARMS]
    assert list(arms) == list(plan.norms)
    assert len({arm["updates"] for arm in arms.values()}) == 1
    assert value == min(arm["loss"] for arm in arms.values())


def test_speech_too(tiny_speech: SpeechConfig, tmp_path: Path) -> None:
    """Another kind of recipe, fields of its own, a sampler and a pruner."""
    found = open_experiment(tiny_speech)
    config = replace(tiny_speech, epochs=1, norm="none", data_sha256=found.sha256)
    space = {
        "optimizer.lr": {"low": 1e-3, "high": 0.1, "log": True},
        "model.bidirectional": [True, False],
        "model.hidden": {"low": 2, "high": 4},
    }
    plan = Plan(config, space, ("none", "sequence"), "tpe", "median")
    study = Study("s", f"sqlite:///{tmp_path / 'study.db'}", plan, 2)
    with closing(study):
        work(study, tmp_path / "out", lambda: None)
        rows = study.rows()
    assert [row["state"] for row in rows] == ["complete", "complete"]
    for row in rows:
        for arm, result in row["arms"].items():
            run = tmp_path / "out" / "trials" / f"{row['trial']:04d}" / arm
            valid = [r["loss"] for r in rows_of(run) if r["split"] == "valid"]
            assert len(valid) == 2
            assert (result["loss"], result["final"]) == (min(valid), valid[-1])
            assert result["diverged"] is (valid[-1] > 2 * math.log(7))
            saved = read_config(json.loads((run / "config.json").read_text()))
            assert isinstance(saved, SpeechConfig)
            assert saved.norm == arm
            assert saved.model.hidden == row["settings"]["model.hidden"]
            assert saved.model.bidirectional is row["settings"]["model.bidirectional"]


def test_divergence_is_a_result(tiny_plan: Plan, tmp_path: Path) -> None:
    fine, reported = _arm(tiny_plan, tmp_path / "fine", lr=0.05)
    assert fine["diverged"] is False
    assert reported == [fine["loss"]]
    # Not finite: stops at once.
    lost, reported = _arm(tiny_plan, tmp_path / "infinite", lr=1e38)
    assert lost["diverged"] is True
    assert lost["loss"] is None
    assert "at update" in lost["reason"]
    assert reported == []
    # Finite, but worse than twice log 13, the uniform guess over the symbols of this text.
    bad, _ = _arm(tiny_plan, tmp_path / "bad", lr=30.0)
    assert bad["diverged"] is True
    assert bad["final"] > 2 * 2.5649
    assert "above 2 log 13" in bad["reason"]


def test_ctrl_c_at_the_very_end_of_a_run_stops_the_worker(
    tiny_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run cannot stop any more and finishes; no other trial begins."""

    def late(*_: object) -> float:
        with Interrupt() as of_the_run:
            os.kill(os.getpid(), signal.SIGINT)
        assert of_the_run.requested
        return 1.0

    monkeypatch.setattr("normrnn.experiments.search.worker.run_trial", late)
    before = signal.getsignal(signal.SIGINT)
    study = Study("s", f"sqlite:///{tmp_path}/study.db", tiny_plan, TRIALS, 3)
    with closing(study):
        with pytest.raises(Interrupted), Interrupt() as interrupt:
            work(study, tmp_path / "out", interrupt.poll)
        assert len(study.done()) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_a_setting_that_cannot_be_run_stops_no_other(tiny_plan: Plan, tmp_path: Path) -> None:
    plan = replace(tiny_plan, space={"train.batch": [8, 10**6]}, norms=("none",))
    with closing(Study("s", f"sqlite:///{tmp_path}/study.db", plan, 6, 1)) as study:
        with pytest.raises(UserError, match=r"trial \d \(.*000.*\) cannot be run: the train"):
            work(study, tmp_path / "out", lambda: None)
        done = {row["trial"]: row["settings"]["train.batch"] for row in study.rows()}
        waiting = {t.user_attrs[SLOT] for t in study.trials(TrialState.WAITING)}
    assert set(done.values()) == {8}
    assert waiting == set(range(6)) - done.keys()
    assert waiting


def test_a_run_goes_on_as_it_was_computed(tiny_plan: Plan, tmp_path: Path) -> None:
    """Its threads are its own; another worker may have others."""
    run_tiny(tiny_plan.config, tmp_path / "run")
    config = replace(tiny_plan.config, epochs=2, threads=2)
    run_arm(config, tmp_path / "run", Pruning(_NoPruning(), 0), lambda: None)  # type: ignore[arg-type]
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (saved["epochs"], saved["threads"]) == (2, 1)


def test_a_run_that_somebody_trains_is_waited_for(
    tiny_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given up for dead, but alive: its directory is locked."""
    calls = []

    def busy_once(*_: object) -> float:
        calls.append(1)
        if len(calls) == 1:
            raise BusyError("another process is training in there")
        return 1.0

    monkeypatch.setattr("normrnn.experiments.search.worker.run_trial", busy_once)
    with closing(Study("s", f"sqlite:///{tmp_path}/study.db", tiny_plan, 1, 1)) as study:
        work(study, tmp_path / "out", lambda: None)
        assert [row["value"] for row in study.rows()] == [1.0]
    assert len(calls) == 2


def test_validations_of_all_arms_are_numbered_without_a_gap(
    tiny_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruners divide by the number of the last."""
    first = []
    config = replace(tiny_plan.config, epochs=2, train=replace(tiny_plan.config.train, segments=3))

    def arm(_: object, __: Path, pruning: Pruning, *___: object) -> dict[str, Any]:
        first.append(pruning.first)
        return {"diverged": False, "loss": 1.0, "train": 1.0}

    monkeypatch.setattr("normrnn.experiments.search.worker.run_arm", arm)
    plan = replace(tiny_plan, config=config)
    with closing(Study("s", f"sqlite:///{tmp_path}/study.db", plan, 1, 1)) as study:
        work(study, tmp_path / "out", lambda: None)
    assert first == [0, 6]


def test_a_worker_ends_with_a_command_that_is_gone(tiny_plan: Plan, tmp_path: Path) -> None:
    """Killed before the worker could ask who its parent is."""
    storage = f"sqlite:///{tmp_path}/study.db"
    order = Order("s", storage, 50, 1, str(tmp_path / "out"), tiny_plan.to_json())
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    worker, log = _start(order, "orphan.log", {PARENT: str(gone.pid)})
    # By its own word, or by the signal where it has nothing to put in order yet.
    assert worker.wait(timeout=120) in (130, -signal.SIGTERM), log.read_text()
    with closing(Study("s", storage, tiny_plan, 50, 1)) as study:
        assert len(study.done()) < 50
