"""Slots: exactly N settings, each done once, whatever happens to the workers. No training here."""

import importlib.util
import itertools
import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from normrnn.errors import UsageError, UserError
from normrnn.experiments.search.plan import NEEDS, PRUNERS, SAMPLERS, Plan
from normrnn.experiments.search.space import SPACES, draw
from normrnn.experiments.search.study import (
    _OPTUNA,
    HEARTBEAT,
    IDENTITY,
    SLOT,
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


def _do(study: Study, value: float) -> int:
    """Claim a slot and finish it; the slot."""
    trial = study.claim()
    assert trial is not None
    with study.alive(trial):
        draw(trial, study.plan.space, study.plan.config)
        study.finish(trial, value)
    return trial.user_attrs[SLOT]


def _settings(study: Study) -> dict[int, dict]:
    return {slot: trial.params for slot, trial in study.done().items()}


def test_every_slot_is_done_once(study: Open) -> None:
    first, second = study(), study()
    first.open_slots()
    second.open_slots()
    slots = [_do(worker, k) for k, worker in enumerate((first, second, second, first))]
    assert sorted(slots) == [0, 1, 2, 3]
    assert first.claim() is None
    first.reclaim()
    assert second.claim() is None
    assert len(first.trials()) == 4
    assert [row["trial"] for row in first.rows()] == [0, 1, 2, 3]
    assert len({tuple(params.values()) for params in _settings(second).values()}) == 4
    # Starting again goes on: a larger study has more slots, its old ones are done.
    more = study(6)
    more.open_slots()
    assert sorted([_do(more, 1), _do(more, 2)]) == [4, 5]


def test_settings_depend_on_the_slot_alone(study: Open) -> None:
    one = study()
    one.open_slots()
    for _ in range(4):
        _do(one, 1.0)
    other = study(name="other")
    other.open_slots()
    kept = [other.claim() for _ in range(4)]  # all at once, drawn in another order
    for trial in reversed(kept):
        assert trial is not None
        # The sampler belongs to the last claim; a worker draws right after its own.
        other.optuna.sampler = other._sampler(trial.user_attrs[SLOT])
        draw(trial, PLAN.space, PLAN.config)
        other.finish(trial, 1.0)
    assert _settings(other) == _settings(one)
    rates = [params["optimizer.lr"] for params in _settings(one).values()]
    assert all(1e-4 <= lr <= 1 for lr in rates)
    seeded = replace(PLAN, config=replace(PLAN.config, seed=2))
    third = study(plan=seeded, name="third")
    third.open_slots()
    for _ in range(4):
        _do(third, 1.0)
    assert not set(rates) & {p["optimizer.lr"] for p in _settings(third).values()}


def test_two_queued_at_once_are_run_once(study: Open) -> None:
    worker, late = study(2), study(2)
    worker.open_slots()
    # What two workers do that miss each other: the same slots again.
    for slot in (0, 1):
        late.optuna.enqueue_trial({}, user_attrs={SLOT: slot})
    done = [_do(worker, 1.0)]
    running = late.claim()
    assert running is not None
    with late.alive(running):
        assert worker.claim() is None
        draw(running, PLAN.space, PLAN.config)
        late.finish(running, 1.0)
    assert sorted([*done, running.user_attrs[SLOT]]) == [0, 1]
    worker.reclaim()
    assert worker.claim() is None
    states = [t.state for t in worker.trials()]
    assert states.count(TrialState.COMPLETE) == states.count(TrialState.FAIL) == 2
    assert len(worker.rows()) == 2


def test_given_back_means_the_same_setting_again(study: Open) -> None:
    worker, other = study(1), study(1)
    worker.open_slots()
    trial = worker.claim()
    assert trial is not None
    with worker.alive(trial):
        drawn = draw(trial, PLAN.space, PLAN.config)
        worker.give_back(trial)
    again = other.claim()
    assert again is not None
    assert again.number != trial.number
    with other.alive(again):
        assert draw(again, PLAN.space, PLAN.config) == drawn
        # The first one comes too late.
        worker.finish(trial, 0.5)
        other.finish(again, 2.0)
    assert [row["value"] for row in worker.rows()] == [2.0]


def test_silent_workers_are_noticed_by_heartbeat_and_living_ones_are_not(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    dead, living = Study("s", url, PLAN, 2, heartbeat=2), Study("s", url, PLAN, 2, heartbeat=2)
    dead.open_slots()
    silent, busy = dead.claim(), living.claim()
    assert silent is not None
    assert busy is not None
    drawn = draw(silent, PLAN.space, PLAN.config)
    living.reclaim()
    assert living.claim() is None  # not dead yet
    with living.alive(busy):
        deadline = time.monotonic() + 60
        again = None
        while again is None:
            assert time.monotonic() < deadline
            time.sleep(0.2)
            living.reclaim()
            again = living.claim()
        assert again.user_attrs[SLOT] == silent.user_attrs[SLOT]
        assert draw(again, PLAN.space, PLAN.config) == drawn
        draw(busy, PLAN.space, PLAN.config)
        living.finish(busy, 1.0)
    dead.finish(silent, 0.1)  # it was only asleep: nobody waits for it any more
    living.finish(again, 2.0)
    values = {row["trial"]: row["value"] for row in living.rows()}
    assert values == {silent.user_attrs[SLOT]: 2.0, busy.user_attrs[SLOT]: 1.0}


def test_an_infinite_objective_is_kept_and_pruned_trials_count(study: Open) -> None:
    worker = study(2)
    worker.open_slots()
    _do(worker, math.inf)
    trial = worker.claim()
    assert trial is not None
    with worker.alive(trial):
        draw(trial, PLAN.space, PLAN.config)
        worker.finish(trial, None)
    assert [(r["state"], r["value"]) for r in worker.rows()] == [
        ("complete", None),
        ("pruned", None),
    ]


OTHERS = [
    (replace(PLAN, config=replace(PLAN.config, epochs=1)), "epochs was 20, is now 1"),
    (replace(PLAN, config=recipe("ptb-small")), "recipe was ptb-char, is now ptb-small"),
    (replace(PLAN, space={"optimizer.lr": [1.0]}), "space.optimizer.lr"),
    (replace(PLAN, norms=("none", "frame")), "norms was"),
    (replace(PLAN, sampler="tpe"), "sampler was random, is now tpe"),
    (replace(PLAN, config=replace(PLAN.config, data_sha256="0")), "the data has changed"),
]


def test_another_study_under_the_same_name_is_refused(study: Open) -> None:
    first = study()
    first.open_slots()
    for plan, said in OTHERS:
        with pytest.raises(UserError, match=said) as raised:
            study(4, plan)
        assert "use another --study or --storage" in str(raised.value)
        assert len(str(raised.value)) < 400  # of another recipe, that alone
    assert len(study().trials(TrialState.WAITING)) == 4


def test_where_the_data_lies_and_threads_may_differ(study: Open) -> None:
    study()
    moved = replace(PLAN.config, data="/elsewhere", threads=7, device="cuda")
    assert study(4, replace(PLAN, config=moved)).name == "s"


def test_a_study_that_nobody_said_anything_about_is_free(tmp_path: Path) -> None:
    """Its first worker was killed between making it and saying what it is about."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    optuna.create_study(storage=url, study_name="s")
    study = Study("s", url, PLAN, 1)
    study.open_slots()
    assert _do(study, 1.0) == 0
    with pytest.raises(UserError, match="epochs was 20, is now 1"):
        Study("s", url, OTHERS[0][0], 1)


def test_a_slow_beat_is_a_beat(tmp_path: Path) -> None:
    """Somebody in a hurry joins: who was there before is not dead."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    slow = Study("s", url, PLAN, 1, heartbeat=60)
    slow.open_slots()
    trial = slow.claim()
    assert trial is not None
    hasty = Study("s", url, PLAN, 1, heartbeat=1)
    time.sleep(4.5)
    hasty.reclaim()
    assert hasty.claim() is None
    draw(trial, PLAN.space, PLAN.config)
    slow.finish(trial, 1.0)
    assert [t.state for t in hasty.trials()] == [TrialState.COMPLETE]


def test_a_study_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    optuna.create_study(storage=url, study_name="s").enqueue_trial({"x": 1})
    with pytest.raises(UserError, match="'s' in this storage is not one of normrnn search"):
        Study("s", url, PLAN, 4)
    assert len(optuna.load_study(storage=url, study_name="s").trials) == 1


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


def test_files_that_are_something_else_stay_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("Dear Ms Jones, " * 100)
    with pytest.raises(UserError, match="not a"):
        open_storage(f"sqlite:///{file}")
    assert file.read_text() == "Dear Ms Jones, " * 100


def test_a_storage_lost_on_the_way_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    study = Study("s", f"sqlite:///{path}", PLAN, 2)
    with sqlite3.connect(path) as connection:
        connection.execute("drop table trial_user_attributes")
    connection.close()
    with (
        pytest.raises(UserError, match="does not answer: no such table"),
        storage_errors(),
    ):
        study.open_slots()


@pytest.mark.parametrize(("place", "kind"), [(_OPTUNA / "normrnn", UserError), (".", ValueError)])
def test_errors_of_the_storage_are_told_from_our_own(place: Path, kind: type[Exception]) -> None:
    """Also where Optuna lies in a directory called normrnn, as a user's home may be."""
    code = compile("raise ValueError('five')", str(Path(place, "code.py")), "exec")
    with pytest.raises(kind, match="five"), storage_errors():
        exec(code)


def test_names_of_samplers_and_pruners() -> None:
    with pytest.raises(UsageError, match="cmaes"):  # its state in the storage is a pickle
        replace(PLAN, sampler="cmaes")
    with pytest.raises(UsageError, match="no sampler 'lucky': there are bruteforce"):
        replace(PLAN, sampler="lucky")
    with pytest.raises(UsageError, match="no pruner 'rose'"):
        replace(PLAN, pruner="rose")


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_every_sampler(study: Open, name: str) -> None:
    """It draws from its space, also after infinite losses; or says at once what it needs."""
    grid = {"optimizer.lr": [1.0, 2.0, 4.0], "train.batch": [32, 64], "model.hidden": [8]}
    space = grid if name == "bruteforce" else PLAN.space
    package = NEEDS.get(name)
    if package and importlib.util.find_spec(package) is None:
        with pytest.raises(UserError, match=f"the sampler {name} needs {package}"):
            replace(PLAN, sampler=name)
        return
    plan = replace(PLAN, sampler=name, space=space)
    one = study(6, plan)
    one.open_slots()
    for k in range(6):
        _do(one, math.inf if k == 2 else k)
    drawn = [tuple(params.values()) for params in _settings(one).values()]
    assert len(set(drawn)) == 6
    if name == "bruteforce":
        assert set(drawn) == set(itertools.product(*grid.values()))
    else:
        assert all(1e-4 <= lr <= 1 and batch in (32, 64, 128) for lr, _, batch in drawn)


def test_tpe_learns(study: Open) -> None:
    """The best learning rate is 0.01: after its random start TPE comes nearer than chance does."""
    space = {"optimizer.lr": PLAN.space["optimizer.lr"]}
    misses: dict[str, list[float]] = {"random": [], "tpe": []}
    for sampler, found in misses.items():
        plan = replace(PLAN, sampler=sampler, space=space)
        one = study(30, plan, sampler)
        one.open_slots()
        while (trial := one.claim()) is not None:
            found.append(abs(math.log(draw(trial, space, plan.config)["optimizer.lr"] / 0.01)))
            one.finish(trial, found[-1])
    assert misses["tpe"][:10] == misses["random"][:10]
    assert sum(misses["tpe"][10:]) < sum(misses["random"][10:])


def test_brute_force_needs_an_end() -> None:
    with pytest.raises(UsageError, match=r"give optimizer\.lr as a list, or its range with a step"):
        replace(PLAN, sampler="bruteforce")
    steps = {
        "optimizer.lr": {"low": 1, "high": 2, "step": 0.5},
        "model.hidden": {"low": 1, "high": 2},
    }
    assert replace(PLAN, sampler="bruteforce", space=steps).space == steps


@pytest.mark.parametrize("name", sorted(PRUNERS))
def test_every_pruner(study: Open, name: str) -> None:
    """Trials that are ever worse than those before are given up, but for pruner none."""
    one = study(12, replace(PLAN, pruner=name))
    one.open_slots()
    for k in range(12):
        trial = one.claim()
        assert trial is not None
        with one.alive(trial):
            draw(trial, PLAN.space, PLAN.config)
            value: float | None = float(k)
            for step in (0, 1, 2, 3, 1000, 1001):
                trial.report(k, step)
                if trial.should_prune():
                    value = None
                    break
            one.finish(trial, value)
    states = [row["state"] for row in one.rows()]
    assert len(states) == 12
    assert states[0] == "complete"
    assert ("pruned" in states) is (name != "none")


def test_a_setting_outlives_a_trial_that_drew_nothing(study: Open) -> None:
    worker = study(1, replace(PLAN, sampler="tpe"))
    worker.open_slots()
    first = worker.claim()
    assert first is not None
    drawn = draw(first, PLAN.space, PLAN.config)
    worker.give_back(first)
    second = worker.claim()
    assert second is not None
    worker.give_back(second)  # before it drew
    third = worker.claim()
    assert third is not None
    worker.optuna.sampler = optuna.samplers.RandomSampler(seed=99)
    assert draw(third, PLAN.space, PLAN.config) == drawn


def test_a_plan_travels_as_json() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN


@pytest.mark.parametrize(
    ("name", "value"), [(HEARTBEAT, "soon"), (HEARTBEAT, None), (HEARTBEAT, [1])]
)
def test_a_beat_that_is_no_number_is_none(study: Open, name: str, value: object) -> None:
    study(4).optuna.set_user_attr(name, value)
    joined = study(4)
    assert joined.optuna.user_attrs[HEARTBEAT] == 1
    joined.reclaim()


def test_slots_that_are_none_are_not_ours(study: Open) -> None:
    one = study(2)
    for slot in (-1, "0", 2.0, None):
        one.optuna.enqueue_trial({}, user_attrs={SLOT: slot})
    one.open_slots()
    assert sorted([_do(one, 1.0), _do(one, 2.0)]) == [0, 1]
    assert one.claim() is None
    assert sorted(one.done()) == [0, 1]


def test_an_identity_that_is_none(study: Open) -> None:
    """Somebody else's trials: refused, in words."""
    one = study(2)
    one.optuna.set_user_attr(IDENTITY, ["no", "plan"])
    one.optuna.enqueue_trial({})
    with pytest.raises(UserError, match="is not one of normrnn search"):
        study(2)
