"""A study: slots in a database that any number of workers share.

A study of N trials has N slots, each one setting. A slot is an Optuna trial that waits to be
claimed; its setting is drawn when a worker claims it. When the worker dies, Optuna's heartbeat
fails its trial, and the slot is queued again with the same setting. So every slot is done once,
by the one trial that finished it.
"""

import contextlib
import hashlib
import json
import threading
import time
import traceback
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from normrnn.errors import UsageError, UserError, notice
from normrnn.experiments.search.plan import PRUNERS, SAMPLERS, Plan

GRACE = 3
"""A worker counts as dead after this many heartbeats without a sign."""
SLOT, ARMS, SHA256 = "slot", "arms", "sha256"
"""User attributes of a trial: its slot, the results of its arms, a hash of both."""
IDENTITY, HEARTBEAT = "normrnn", "heartbeat"
"""User attributes of a study: its plan, and the longest heartbeat of its workers."""
DONE = (TrialState.COMPLETE, TrialState.PRUNED)
OPEN = (TrialState.WAITING, TrialState.RUNNING)
_PACKAGE = Path(__file__).parents[2]
_OPTUNA = Path(optuna.__file__).parent

optuna.logging.set_verbosity(optuna.logging.ERROR)


def open_storage(url: str, heartbeat: int = 60) -> RDBStorage:
    """Open sqlite:///FILE or postgresql://…; UserError if it cannot be reached."""
    if "://" not in url:
        raise UsageError(
            f"--storage {url!r} is none of sqlite:///FILE, postgresql://USER@HOST/DATABASE"
        )
    scheme = url.split(":")[0]
    try:
        return _database(url, heartbeat)
    except DBAPIError as error:
        address = make_url(url).render_as_string(hide_password=True)
        reason = str(error.orig).strip().splitlines()[0]
        raise UserError(f"the storage {address} cannot be reached: {reason}") from None
    except (ArgumentError, NoSuchModuleError, ImportError, ValueError) as error:
        raise UsageError(f"--storage {scheme}://… cannot be used: {error}") from None
    except (SQLAlchemyError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the storage {scheme}://… cannot be used: {reason}") from None


def _database(url: str, heartbeat: int) -> RDBStorage:
    scheme, rest = url.split("://", 1)
    if scheme in ("postgres", "postgresql"):
        url = f"postgresql+psycopg://{rest}"
    if scheme.startswith("sqlite") and make_url(url).database in (None, "", ":memory:"):
        raise ValueError("workers cannot share a database in memory; name a file")
    options = {"timeout": 60} if scheme.startswith("sqlite") else {"connect_timeout": 10}
    for attempt in range(5):
        try:
            with quiet():
                return RDBStorage(
                    url,
                    engine_kwargs={"connect_args": options, "pool_pre_ping": True},
                    heartbeat_interval=heartbeat,
                    grace_period=GRACE * heartbeat,
                )
        except DBAPIError as error:
            # Two workers that create the tables at once: the second finds them created.
            message = str(error).lower()
            if attempt == 4 or not ("already exists" in message or "unique" in message):
                raise
            time.sleep(0.2 * (attempt + 1))
    raise AssertionError("the last attempt returns or raises")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress Optuna's warnings that heartbeats are experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Raise UserError for a storage that fails."""
    try:
        yield
    except (StorageInternalError, DBAPIError) as error:
        cause = error.__cause__ or error
        reason = str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]
        raise UserError(f"the storage does not answer: {reason}") from None
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        # Optuna raises these where its storage is damaged.
        places = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
        own = max(i for i, place in enumerate(places) if place.is_relative_to(_PACKAGE))
        if not any(place.is_relative_to(_OPTUNA) for place in places[own:]):
            raise
        raise UserError(f"the storage is damaged ({type(error).__name__}: {error})") from None


class Study:
    """One study, as one worker sees it."""

    def __init__(self, name: str, url: str, plan: Plan, count: int, heartbeat: int = 60) -> None:
        """Begin or join the study; UserError if another one has its name."""
        self.name, self.plan, self.count, self.heartbeat = name, plan, count, heartbeat
        self._database = open_storage(url, heartbeat)
        self.storage: Any = optuna.storages.get_storage(self._database)
        with storage_errors():
            self.optuna = self._join()
            self.id = self.storage.get_study_id_from_name(name)

    def close(self) -> None:
        """Close the database."""
        self._database.remove_session()
        self._database.engine.dispose()

    def _join(self) -> optuna.Study:
        pruner = getattr(optuna.pruners, PRUNERS[self.plan.pruner])()
        is_known = self.name in optuna.get_all_study_names(self.storage)
        with quiet():
            study = optuna.create_study(
                storage=self.storage, study_name=self.name, pruner=pruner, load_if_exists=True
            )
        # The brute-force sampler calls it after the last setting; here the slots decide.
        study.stop = lambda: None  # type: ignore[method-assign]
        found = self._identity_of(study) if is_known else None
        if found is not None:
            if changes := self.plan.changes(found):
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
        # Another worker may have created the study and not written its identity yet.
        for _ in range(20):
            if isinstance(found := study.user_attrs.get(IDENTITY), dict):
                return found
            if study.get_trials(deepcopy=False):
                break
            time.sleep(0.1)
        return None

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials of our slots in these states, or in any."""
        every = self.optuna.get_trials(deepcopy=False, states=states or None)
        slots = range(self.count)
        return [t for t in every if type(s := t.user_attrs.get(SLOT)) is int and s in slots]

    def done(self) -> dict[int, FrozenTrial]:
        """Return slot -> the trial that finished it."""
        return {t.user_attrs[SLOT]: t for t in reversed(self.trials(*DONE))}

    def open_slots(self) -> None:
        """Queue every slot that is neither done, nor running, nor queued."""
        trials = self.trials()
        taken = {t.user_attrs[SLOT] for t in trials if t.state in (*DONE, *OPEN)}
        drawn: dict[int, dict[str, Any]] = {}
        for t in trials:  # the last trial of a slot may have ended before it drew anything
            drawn.setdefault(t.user_attrs[SLOT], {}).update(t.params)
        for slot in range(self.count):
            if slot not in taken:
                self.optuna.enqueue_trial(drawn.get(slot, {}), user_attrs={SLOT: slot})

    def claim(self, excluded: Collection[int] = ()) -> Trial | None:
        """Return a waiting slot, now claimed, with a heartbeat; None if there is none."""
        for waiting in self.trials(TrialState.WAITING):
            slot = waiting.user_attrs[SLOT]
            if slot in excluded:
                continue
            trial_id = self._id_of(waiting)
            try:  # before the claim, so that the death of a worker right after it is noticed
                self._record(trial_id)
            except (SQLAlchemyError, StorageInternalError):
                continue  # another worker claims this one
            if self._set(trial_id, TrialState.RUNNING):
                if self._is_only_one(waiting):
                    self.optuna.sampler = self._sampler(slot)
                    return Trial(self.optuna, trial_id)
                self._set(trial_id, TrialState.FAIL)
        return None

    def _is_only_one(self, mine: FrozenTrial) -> bool:
        """Return whether no other trial has the slot: two workers may queue it at the same time."""
        others = self.trials(TrialState.RUNNING, *DONE)
        slot = mine.user_attrs[SLOT]
        return not any(t.user_attrs[SLOT] == slot and t.number != mine.number for t in others)

    def _sampler(self, slot: int) -> optuna.samplers.BaseSampler:
        """Return a sampler seeded by the slot: settings do not depend on who draws them."""
        name = SAMPLERS[self.plan.sampler]
        seed = (self.plan.config.seed * 1_000_003 + slot) % 2**32
        with quiet():
            return getattr(optuna.samplers, name)(seed=seed)

    def finish(self, trial: Trial, value: float | None) -> None:
        """Record the objective, None if pruned; nothing if the trial was given up for dead."""
        state = TrialState.PRUNED if value is None else TrialState.COMPLETE
        now = self.storage.get_trial(trial._trial_id)
        if value is None and now.last_step is not None:  # what Optuna records as its value
            value = now.intermediate_values[now.last_step]
        with contextlib.suppress(UpdateFinishedTrialError):
            trial.set_user_attr(SHA256, _digest(now, value))
        value = None if state == TrialState.PRUNED else value
        self.optuna.tell(trial, value, state=state, skip_if_finished=True)

    def give_back(self, trial: Trial) -> None:
        """Queue the slot of an unfinished trial again."""
        self._set(trial._trial_id, TrialState.FAIL)
        self.open_slots()

    def reclaim(self) -> None:
        """Queue the slots of dead workers again."""
        # Workers with a longer heartbeat than ours are alive as well.
        self._database.grace_period = GRACE * (_beat(self.optuna) or self.heartbeat)
        with quiet():
            optuna.storages.fail_stale_trials(self.optuna)
        self.open_slots()

    @contextlib.contextmanager
    def alive(self, trial: Trial) -> Iterator[None]:
        """Record heartbeats while inside."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(self.heartbeat):
                # A storage may be out of reach for a moment.
                with contextlib.suppress(SQLAlchemyError, StorageInternalError):
                    self._record(trial._trial_id)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _record(self, trial_id: int) -> None:
        with quiet():
            self.storage.record_heartbeat(trial_id)

    def _set(self, trial_id: int, state: TrialState) -> bool:
        """Return whether the trial changed its state, which is true for one worker only."""
        try:
            return self.storage.set_trial_state_values(trial_id, state)
        except UpdateFinishedTrialError:
            return False

    def _id_of(self, trial: FrozenTrial) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self.id, trial.number)

    def rows(self) -> list[dict[str, Any]]:
        """Return the trial table: one row per finished slot."""
        done = sorted(self.done().items())
        for slot, trial in done:
            if SHA256 not in trial.user_attrs:
                notice(f"the study {self.name!r} has trials without a checksum: not verified")
            elif trial.user_attrs[SHA256] != _digest(trial, trial.value):
                raise UserError(f"trial {slot} in the storage is damaged: not what was written")
        return [_row(slot, trial) for slot, trial in done]


def _beat(study: optuna.Study) -> int:
    """Return the longest heartbeat of the workers that joined; 0 if none did."""
    found = study.user_attrs.get(HEARTBEAT)
    return found if type(found) is int else 0


def _digest(trial: FrozenTrial, value: float | None) -> str:
    """Return a hash of the setting and the results of a trial."""
    attrs = [trial.user_attrs.get(name) for name in (SLOT, ARMS)]
    value = None if value is None else float(value)  # as every database returns it
    told = json.dumps([trial.params, attrs, value], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def _row(slot: int, trial: FrozenTrial) -> dict[str, Any]:
    """Return the row of trials.jsonl; JSON has no infinity."""
    is_finite = trial.value is not None and trial.value < float("inf")
    return {
        "trial": slot,
        "state": trial.state.name.lower(),
        "value": trial.value if is_finite else None,
        "settings": trial.params,
        "arms": trial.user_attrs.get(ARMS, {}),
    }
