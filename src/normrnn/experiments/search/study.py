"""A study: slots in a storage that any number of workers share.

A study of N trials has N slots, each one setting. A slot is an Optuna trial that waits to be
claimed; its setting is drawn when a worker claims it. When the worker dies, its trial fails and
the slot is queued again with the same setting. So N settings end up accounted for, whoever comes
and goes: a slot is done once, by the one trial that finished it.
"""

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
from filelock import FileLock
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from normrnn.errors import UserError, notice
from normrnn.experiments.search.plan import PRUNERS, SAMPLERS, Plan
from normrnn.experiments.search.storage import (
    GRACE,
    journal_locks,
    open_storage,
    quiet,
    storage_errors,
)
from normrnn.locks import try_lock

SLOT, ARMS, SHA256 = "slot", "arms", "sha256"
"""User attributes of a trial: which slot it fills, what its arms came to, a hash of all that."""
IDENTITY, HEARTBEAT = "normrnn", "heartbeat"
"""User attributes of a study: what it is about, the longest beat of those who joined."""
DONE = (TrialState.COMPLETE, TrialState.PRUNED)
OPEN = (TrialState.WAITING, TrialState.RUNNING)


class Study:
    """One study, as one worker sees it."""

    def __init__(self, name: str, url: str, plan: Plan, count: int, heartbeat: int = 60) -> None:
        """Begin the study or join it; UserError if there is another one under its name."""
        self.name, self.plan, self.count, self.heartbeat = name, plan, count, heartbeat
        self._opened = open_storage(url, heartbeat)
        self.storage = optuna.storages.get_storage(self._opened)
        journal = url.startswith("journal:")
        self.journal = Path(url.removeprefix("journal:")) if journal else None
        self._held: dict[int, FileLock] = {}
        with storage_errors():
            self.optuna = self._join()
            self.id = self.storage.get_study_id_from_name(name)

    def close(self) -> None:
        """Let go of the database and of every lock."""
        for number in list(self._held):
            self._unlock(number)
        if isinstance(self._opened, RDBStorage):
            self._opened.remove_session()
            self._opened.engine.dispose()

    def _join(self) -> optuna.Study:
        pruner = getattr(optuna.pruners, PRUNERS[self.plan.pruner])()
        known = self.name in optuna.get_all_study_names(self.storage)
        with quiet():
            study = optuna.create_study(
                storage=self.storage, study_name=self.name, pruner=pruner, load_if_exists=True
            )
        # Brute force calls it after the last of all settings; here the slots decide.
        study.stop = lambda: None  # type: ignore[method-assign]
        theirs = self._identity_of(study) if known else None
        if theirs is not None:
            if changes := self.plan.changes(theirs):
                raise UserError(
                    f"the study {self.name!r} in this storage has other settings ({changes}): use"
                    " another --study or --storage"
                )
        elif study.get_trials(deepcopy=False):
            raise UserError(f"the study {self.name!r} in this storage is not one of normrnn search")
        else:
            study.set_user_attr(IDENTITY, self.plan.identity())
        if self.heartbeat > _beat(study):
            study.set_user_attr(HEARTBEAT, self.heartbeat)
        return study

    @staticmethod
    def _identity_of(study: optuna.Study) -> dict[str, Any] | None:
        # Somebody may have made the study a moment ago and not said yet what it is about.
        for _ in range(20):
            if isinstance(found := study.user_attrs.get(IDENTITY), dict):
                return found
            if study.get_trials(deepcopy=False):
                break
            time.sleep(0.1)
        return None

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """The trials of our slots in these states, or in any."""
        every = self.optuna.get_trials(deepcopy=False, states=states or None)
        slots = range(self.count)
        return [t for t in every if type(s := t.user_attrs.get(SLOT)) is int and s in slots]

    def done(self) -> dict[int, FrozenTrial]:
        """Slot -> the trial that finished it."""
        return {t.user_attrs[SLOT]: t for t in reversed(self.trials(*DONE))}

    def open_slots(self) -> None:
        """Queue every slot that nobody has done, runs, or will run."""
        trials = self.trials()
        taken = {t.user_attrs[SLOT] for t in trials if t.state in (*DONE, *OPEN)}
        drawn: dict[int, dict[str, Any]] = {}
        for t in trials:  # the last of a slot's trials may have ended before it drew anything
            drawn.setdefault(t.user_attrs[SLOT], {}).update(t.params)
        for slot in range(self.count):
            if slot not in taken:
                self.optuna.enqueue_trial(drawn.get(slot, {}), user_attrs={SLOT: slot})

    def claim(self, but: Collection[int] = ()) -> Trial | None:
        """A waiting slot that is ours from now on, with a sign of life; None if there is none,
        or none `but` these."""
        for waiting in self.trials(TrialState.WAITING):
            if waiting.user_attrs[SLOT] in but:
                continue
            trial_id = self._id_of(waiting)
            # Before the claim: a worker killed right after it is missed all the same.
            if not self._sign(trial_id, waiting.number):
                continue
            if self._set(trial_id, TrialState.RUNNING):
                if self._only_one(waiting):
                    slot = waiting.user_attrs[SLOT]
                    self.optuna.sampler = self._sampler(slot)
                    return Trial(self.optuna, trial_id)
                self._set(trial_id, TrialState.FAIL)
            self._unlock(waiting.number)
        return None

    def _only_one(self, mine: FrozenTrial) -> bool:
        """Two workers may queue a dead one's slot at the same moment; it is run once."""
        others = self.trials(TrialState.RUNNING, *DONE)
        slot = mine.user_attrs[SLOT]
        return not any(t.user_attrs[SLOT] == slot and t.number != mine.number for t in others)

    def _sampler(self, slot: int) -> optuna.samplers.BaseSampler:
        """Seeded by the slot: settings do not depend on who draws them, or when."""
        name = SAMPLERS[self.plan.sampler]
        seed = (self.plan.config.seed * 1_000_003 + slot) % 2**32
        with quiet():
            return getattr(optuna.samplers, name)(seed=seed)

    def finish(self, trial: Trial, value: float | None) -> None:
        """Its objective, or None if it was pruned; nothing if it was given up for dead."""
        state = TrialState.PRUNED if value is None else TrialState.COMPLETE
        now = self.storage.get_trial(trial._trial_id)
        if value is None and now.last_step is not None:  # Optuna takes that as its value
            value = now.intermediate_values[now.last_step]
        with contextlib.suppress(UpdateFinishedTrialError):
            trial.set_user_attr(SHA256, _digest(now, value))
        value = None if state == TrialState.PRUNED else value
        self.optuna.tell(trial, value, state=state, skip_if_finished=True)

    def give_back(self, trial: Trial) -> None:
        """Not finished: somebody else may have it."""
        self._set(trial._trial_id, TrialState.FAIL)
        self.open_slots()

    def reclaim(self) -> None:
        """Queue again what dead workers had."""
        if isinstance(self._opened, RDBStorage):
            # Whoever beats more slowly than we do is alive all the same.
            slowest = _beat(self.optuna) or self.heartbeat
            self._opened.grace_period = GRACE * slowest
            with quiet():
                optuna.storages.fail_stale_trials(self.optuna)
        else:
            for running in self.trials(TrialState.RUNNING):
                if self._lock(running.number):
                    self._set(self._id_of(running), TrialState.FAIL)
                    self._unlock(running.number)
        self.open_slots()

    @contextlib.contextmanager
    def alive(self, trial: Trial) -> Iterator[None]:
        """Signs of life while inside."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(self.heartbeat):
                # A storage out of reach for a moment is no reason to die.
                with contextlib.suppress(SQLAlchemyError, StorageInternalError):
                    self._record(trial._trial_id)

        thread = threading.Thread(target=beat, daemon=True)
        if self.journal is None:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            if self.journal is None:
                thread.join()
            else:
                self._unlock(trial.number)

    def _sign(self, trial_id: int, number: int) -> bool:
        if self.journal is not None:
            return self._lock(number)
        try:
            self._record(trial_id)
        except (SQLAlchemyError, StorageInternalError):
            return False  # somebody else signs this one at this moment
        return True

    def _record(self, trial_id: int) -> None:
        with quiet():
            self.storage.record_heartbeat(trial_id)  # type: ignore[attr-defined]

    def _lock(self, number: int) -> bool:
        """A journal has no heartbeat; the system gives up the locks of a dead process."""
        assert self.journal is not None
        lock = try_lock(journal_locks(self.journal) / f"{quote(self.name, safe='')}-{number}")
        if lock is not None:
            self._held[number] = lock
        return lock is not None

    def _unlock(self, number: int) -> None:
        lock = self._held.pop(number, None)
        if lock is not None:
            lock.release()

    def _set(self, trial_id: int, state: TrialState) -> bool:
        """Whether the trial changed its state: only one worker hears yes."""
        try:
            return self.storage.set_trial_state_values(trial_id, state)
        except UpdateFinishedTrialError:
            return False

    def _id_of(self, trial: FrozenTrial) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self.id, trial.number)

    def rows(self) -> list[dict[str, Any]]:
        """The trial table: one row per finished slot."""
        done = sorted(self.done().items())
        for slot, trial in done:
            if SHA256 not in trial.user_attrs:
                notice(f"the study {self.name!r} has trials without a checksum: not verified")
            elif trial.user_attrs[SHA256] != _digest(trial, trial.value):
                raise UserError(f"trial {slot} in the storage is damaged: not what was written")
        return [_row(slot, trial) for slot, trial in done]


def _beat(study: optuna.Study) -> int:
    """The longest of those who joined; 0 of nobody."""
    found = study.user_attrs.get(HEARTBEAT)
    return found if type(found) is int else 0


def _digest(trial: FrozenTrial, value: float | None) -> str:
    """Of what a trial tried and came to."""
    attrs = [trial.user_attrs.get(name) for name in (SLOT, ARMS)]
    value = None if value is None else float(value)  # as every storage gives it back
    told = json.dumps([trial.params, attrs, value], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def _row(slot: int, trial: FrozenTrial) -> dict[str, Any]:
    """As trials.jsonl has it: JSON has no infinity."""
    finite = trial.value is not None and trial.value < float("inf")
    return {
        "trial": slot,
        "state": trial.state.name.lower(),
        "value": trial.value if finite else None,
        "settings": trial.params,
        "arms": trial.user_attrs.get(ARMS, {}),
    }
