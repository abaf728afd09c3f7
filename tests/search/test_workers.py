"""Real workers on real storages; one of them is killed half way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from optuna.trial import TrialState

from normrnn.report.runs import read_rows
from normrnn.search.study import SLOT, Plan, Study
from normrnn.search.worker import Order, run_arm
from tests.search.postgres import server

TRIALS = 4


@pytest.fixture(params=["sqlite", "journal", pytest.param("postgresql", marks=pytest.mark.slow)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A storage of each kind."""
    urls = {"sqlite": f"sqlite:///{tmp_path}/study.db", "journal": f"journal:{tmp_path}/study.log"}
    postgres = request.param == "postgresql"
    with server() if postgres else nullcontext(urls.get(request.param, "")) as url:
        yield url


def _start(order: Order, name: str) -> tuple[subprocess.Popen[bytes], Path]:
    log = Path(order.out) / name
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "normrnn.search.worker"],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
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
        _kill_one(study, order)
        _check(study, tmp_path / "out")


def _kill_one(study: Study, order: Order) -> None:
    """Two workers; one ends in the middle of a trial, the other does what is left."""
    victim, log = _start(order, "victim.log")
    _wait(victim, lambda: "update 6  train" in log.read_text())
    victim.send_signal(signal.SIGSTOP)  # or it would be done before the other has begun
    other, other_log = _start(order, "other.log")
    _wait(other, lambda: "trial" in other_log.read_text())
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    if study.locks is not None:
        # A journal: everybody dies, and the next start notices.
        other.kill()
        other.wait()
        assert study.trials(TrialState.RUNNING)
        other, other_log = _start(order, "next.log")
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

    _trial_id = 0

    def __init__(self) -> None:
        self.reported: list[float] = []
        self.storage = self

    def get_trial(self, _: int) -> "_NoPruning":
        return self

    @property
    def intermediate_values(self) -> dict[int, float]:
        return dict(enumerate(self.reported))

    def report(self, value: float, step: int) -> None:
        assert step == 1000 + len(self.reported)
        self.reported.append(value)

    def should_prune(self) -> bool:
        return False


def _arm(plan: Plan, out: Path, **optimizer: float):
    config = plan.config
    config = replace(config, optimizer=replace(config.optimizer, **optimizer))
    trial = _NoPruning()
    return run_arm(config, out, trial, first=1000), trial.reported  # type: ignore[arg-type]


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
