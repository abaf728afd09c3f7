"""Slots: exactly N settings, each done once, whatever happens to the workers. No training here."""

import itertools
import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from normrnn.errors import UsageError, UserError
from normrnn.experiments.search.space import SPACES, draw
from normrnn.experiments.search.study import (
    _OPTUNA,
    HEARTBEAT,
    IDENTITY,
    PRUNERS,
    SAMPLERS,
    SLOT,
    Plan,
    Study,
    open_storage,
    storage_errors,
)
from normrnn.recipes import recipe

PLAN = Plan(recipe("ptb-char"), SPACES["ptb-char"])
Open = Callable[..., Study]


@pytest.fixture
def study(tmp_path: Path) -> Iterator[Open]:
    """Opens the same study again and again, as workers do."""
    opened: list[Study] = []

    def open_study(count: int = 4, plan: Plan = PLAN, name: str = "s", heartbeat: int = 1) -> Study:
        opened.append(Study(name, f"sqlite:///{tmp_path / 'study.db'}", plan, count, heartbeat))
        return opened[-1]

    yield open_study
    for one in opened:
        one.close()


def _arm(loss: float) -> dict[str, Any]:
    return {"diverged": not math.isfinite(loss), "loss": loss if math.isfinite(loss) else None}


def _objective(study: Study, loss: float = 1.0) -> Callable[[optuna.Trial], dict[str, Any]]:
    def run(trial: optuna.Trial) -> dict[str, Any]:
        draw(trial, study.plan.space, study.plan.config)
        return {"none": _arm(loss), "hidden": _arm(loss + 1)}

    return run


def _settings(study: Study) -> list[dict[str, Any]]:
    return [row["settings"] for row in study.rows()]


def test_every_slot_is_done_once(study: Open) -> None:
    first, second = study(), study()
    for k, worker in enumerate((first, second, second, first)):
        assert worker.run_next(_objective(worker, k))
    assert not first.run_next(_objective(first))
    assert [(row["trial"], row["value"]) for row in second.rows()] == [(k, k) for k in range(4)]
    assert len({tuple(params.values()) for params in _settings(second)}) == 4
    more = study(5)  # a larger study has more slots, its old ones are done
    assert more.run_next(_objective(more))
    assert not more.run_next(_objective(more))
    assert len(more.trials()) == 5


def test_settings_depend_on_the_slot_alone(study: Open) -> None:
    one, other = study(3), study(3, name="other")
    while one.run_next(_objective(one)):
        pass
    nested = [lambda: other.run_next(_objective(other))]

    def objective(trial: optuna.Trial) -> dict[str, Any]:
        if nested:  # another worker takes the next slot before this one draws
            nested.pop()()
        return _objective(other)(trial)

    while other.run_next(objective):
        pass
    assert _settings(other) == _settings(one)
    seeded = study(3, replace(PLAN, config=replace(PLAN.config, seed=2)), "seeded")
    while seeded.run_next(_objective(seeded)):
        pass
    rates = [{row["optimizer.lr"] for row in _settings(x)} for x in (one, seeded)]
    assert len(rates[0] | rates[1]) == 6


def test_a_slot_that_is_queued_twice_is_run_once(study: Open) -> None:
    one, late = study(2), study(2)
    one.fill_queue()
    for slot in (0, 1):  # what a command does that starts at the same time
        late._connect().enqueue_trial({}, user_attrs={SLOT: slot})
    for slot in (-1, "0", 2.0, None):  # not slots of this study
        late._connect().enqueue_trial({}, user_attrs={SLOT: slot})
    calls = []
    while one.run_next(lambda trial: (calls.append(trial), _objective(one)(trial))[1]):
        pass
    assert len(calls) == 2
    states = [t.state for t in one.trials()]
    assert states.count(TrialState.COMPLETE) == states.count(TrialState.FAIL) == 2


def test_a_failed_trial_is_queued_again_with_its_setting(study: Open) -> None:
    one = study(1, replace(PLAN, sampler="tpe"))
    drawn: list[dict[str, Any]] = []

    def fail(trial: optuna.Trial) -> dict[str, Any]:
        if len(drawn) != 1:  # the second ends before it draws
            drawn.append(draw(trial, PLAN.space, PLAN.config))
        else:
            drawn.append(drawn[0])
        if len(drawn) < 3:
            raise RuntimeError("stopped")
        return {"none": _arm(2.0)}

    for _ in range(2):
        with pytest.raises(RuntimeError, match="stopped"):
            one.run_next(fail)
    assert not one.run_next(fail, excluded=[0])
    assert one.run_next(fail)
    assert drawn[0] == drawn[2] == _settings(one)[0]


def test_a_silent_worker_is_replaced_and_its_late_result_dropped(study: Open) -> None:
    silent, other = study(1), study(1)

    def late(trial: optuna.Trial) -> dict[str, Any]:
        first = draw(trial, PLAN.space, PLAN.config)
        silent.storage.record_heartbeat = lambda _: None  # type: ignore[method-assign]
        deadline = time.monotonic() + 60
        while not other.run_next(_objective(other, 2.0)):
            assert time.monotonic() < deadline
            time.sleep(0.3)
        assert _settings(other) == [first]
        return {"none": _arm(0.1)}

    assert silent.run_next(late)
    assert [row["value"] for row in other.rows()] == [2.0]


def test_a_living_worker_keeps_its_trial(study: Open) -> None:
    """Also of a study whose heartbeat is slower than that of the command that joins."""
    slow = study(1, heartbeat=3)
    joined = study(1, heartbeat=1)
    assert joined.heartbeat == 3

    def wait(trial: optuna.Trial) -> dict[str, Any]:
        time.sleep(4.5)
        assert not joined.run_next(_objective(joined))
        return _objective(slow)(trial)

    assert slow.run_next(wait)
    assert [t.state for t in joined.trials()] == [TrialState.COMPLETE]


def test_states_of_trials(study: Open) -> None:
    one = study(2)
    assert one.run_next(_objective(one, math.inf))

    def prune(trial: optuna.Trial) -> dict[str, Any]:
        trial.report(3.0, 0)
        raise optuna.TrialPruned

    assert one.run_next(prune)
    assert [(r["state"], r["value"]) for r in one.rows()] == [("complete", None), ("pruned", None)]


OTHERS = [
    (replace(PLAN, config=replace(PLAN.config, epochs=1)), "epochs was 20, is now 1"),
    (replace(PLAN, config=recipe("ptb-small")), "recipe was ptb-char, is now ptb-small"),
    (replace(PLAN, space={"optimizer.lr": [1.0]}), "space.optimizer.lr"),
    (replace(PLAN, norms=("none", "frame")), "norms was"),
    (replace(PLAN, sampler="tpe"), "sampler was random, is now tpe"),
    (replace(PLAN, config=replace(PLAN.config, data_sha256="0")), "the data has changed"),
]


def test_another_study_under_the_same_name_is_refused(study: Open) -> None:
    study().fill_queue()
    for plan, said in OTHERS:
        with pytest.raises(UserError, match=said) as raised:
            study(4, plan)
        assert len(str(raised.value)) < 400  # of another recipe, that alone
    moved = replace(PLAN.config, data="/elsewhere", threads=7, device="cuda")
    assert len(study(4, replace(PLAN, config=moved)).trials(TrialState.WAITING)) == 4


@pytest.mark.parametrize("identity", [None, ["no", "plan"]])
def test_a_study_of_another_program_is_left_alone(tmp_path: Path, identity: Any) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    other = optuna.create_study(storage=url, study_name="s")
    other.set_user_attr(IDENTITY, identity)
    other.set_user_attr(HEARTBEAT, "soon")
    Study("s", url, PLAN, 1).close()  # empty: its first command ended before it said what it is
    other.enqueue_trial({"x": 1})
    other.set_user_attr(IDENTITY, identity)
    with pytest.raises(UserError, match="'s' in this storage is not one of normrnn search"):
        Study("s", url, PLAN, 4)
    assert len(other.trials) == 1


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("study.db", "none of sqlite:///FILE"),
        ("oracular://here", "oracular://"),
        ("sqlite:////nowhere/at/all/study.db", "cannot be reached: unable to open"),
        ("sqlite://", "in memory; name a file"),
        ("sqlite:///:memory:", "in memory; name a file"),
        ("postgresql://me:secret@127.0.0.1:9/db", "me:.*@127.0.0.1:9/db cannot be reached"),
    ],
)
def test_storages_that_cannot_be_reached(url: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        open_storage(url)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("Dear Ms Jones, " * 100)
    with pytest.raises(UserError, match="not a"):
        open_storage(f"sqlite:///{file}")
    assert file.read_text() == "Dear Ms Jones, " * 100


def test_a_storage_that_breaks(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    study = Study("s", f"sqlite:///{path}", PLAN, 2)
    with sqlite3.connect(path) as connection:
        connection.execute("drop table trial_user_attributes")
    connection.close()
    with pytest.raises(UserError, match="does not answer: no such table"), storage_errors():
        study.fill_queue()


@pytest.mark.parametrize(("place", "kind"), [(_OPTUNA / "normrnn", UserError), (".", ValueError)])
def test_errors_of_the_storage_and_other_errors(place: Path, kind: type[Exception]) -> None:
    """Also where Optuna lies in a directory called normrnn, as a user's home may be."""
    code = compile("raise ValueError('five')", str(Path(place, "code.py")), "exec")
    with pytest.raises(kind, match="five"), storage_errors():
        exec(code)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sampler": "cmaes"}, "cmaes"),  # its state in the storage is a pickle
        ({"pruner": "rose"}, "no pruner 'rose'"),
        ({"sampler": "bruteforce"}, r"give optimizer\.lr as a list, or its range with a step"),
    ],
)
def test_samplers_and_pruners_that_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(PLAN, **change)


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_every_sampler(study: Open, name: str) -> None:
    """It draws from its space, also after infinite losses."""
    grid = {"optimizer.lr": [1.0, 2.0, 4.0], "train.batch": [32, 64], "model.hidden": [8]}
    one = study(6, replace(PLAN, sampler=name, space=grid if name == "bruteforce" else PLAN.space))
    for k in range(6):
        assert one.run_next(_objective(one, math.inf if k == 2 else k))
    drawn = {tuple(params.values()) for params in _settings(one)}
    assert len(drawn) == 6
    if name == "bruteforce":
        assert drawn == set(itertools.product(*grid.values()))
    else:
        assert all(1e-4 <= lr <= 1 and batch in (32, 64, 128) for lr, _, batch in drawn)


@pytest.mark.parametrize("name", sorted(PRUNERS))
def test_every_pruner(study: Open, name: str) -> None:
    """Trials that are ever worse than those before are pruned, but for pruner none."""
    one = study(12, replace(PLAN, pruner=name))

    def objective(trial: optuna.Trial) -> dict[str, Any]:
        loss = trial.user_attrs[SLOT]
        draw(trial, PLAN.space, PLAN.config)
        for step in (0, 1, 2, 3, 1000, 1001):
            trial.report(loss, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return {"none": _arm(loss)}

    while one.run_next(objective):
        pass
    states = [row["state"] for row in one.rows()]
    assert len(states) == 12
    assert states[0] == "complete"
    assert ("pruned" in states) is (name != "none")
