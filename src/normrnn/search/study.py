"""A study: slots in a storage that any number of workers share.

A study of N trials has N slots, each one setting. A slot is an Optuna trial that waits to be
claimed; its setting is drawn when a worker claims it. When the worker dies, its trial fails and
the slot is queued again with the same setting. So N settings end up accounted for, whoever comes
and goes: a slot is done once, by the one trial that finished it.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import threading
import time
import traceback
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
from filelock import FileLock
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from normrnn.config.base import Config
from normrnn.config.jsonio import flat, to_dict
from normrnn.errors import UsageError, UserError, notice
from normrnn.files import following_no_link, open_regular, read_regular
from normrnn.locks import try_lock
from normrnn.recipes import read_config
from normrnn.search.space import Space

SLOT, ARMS, SHA256 = "slot", "arms", "sha256"
"""User attributes of a trial: which slot it fills, what its arms came to, a hash of all that."""
IDENTITY, HEARTBEAT = "normrnn", "heartbeat"
"""User attributes of a study: what it is about, the longest beat of those who joined."""
DONE = (TrialState.COMPLETE, TrialState.PRUNED)
OPEN = (TrialState.WAITING, TrialState.RUNNING)
GRACE = 3
"""A worker is dead after this many heartbeats without a sign."""
SAMPLERS = {
    "random": "RandomSampler",
    "tpe": "TPESampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "qmc": "QMCSampler",
    "nsgaii": "NSGAIISampler",
    "bruteforce": "BruteForceSampler",
}
NEEDS = {"gp": "scipy", "qmc": "scipy", "cmaes": "cmaes"}
"""What Optuna imports only when it draws."""
PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "hyperband": "HyperbandPruner",
    "successivehalving": "SuccessiveHalvingPruner",
}

optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass(frozen=True)
class Plan:
    """What a study is about; workers share one only if they mean the same."""

    config: Config
    space: Space
    norms: tuple[str, ...] = ("none", "hidden")
    sampler: str = "random"
    pruner: str = "none"

    def __post_init__(self) -> None:
        for what, name, known in (
            ("sampler", self.sampler, SAMPLERS),
            ("pruner", self.pruner, PRUNERS),
        ):
            if name not in known:
                raise UsageError(f"no {what} {name!r}: there are {', '.join(sorted(known))}")
        package = NEEDS.get(self.sampler)
        if package and importlib.util.find_spec(package) is None:
            raise UserError(f"the sampler {self.sampler} needs {package}: pip install {package}")
        if self.sampler == "bruteforce":
            fields = flat(to_dict(self.config))
            for name, values in self.space.items():
                endless = isinstance(values, dict) and values.get("step") is None
                if endless and type(fields[name]) is float:
                    raise UsageError(
                        f"the sampler bruteforce tries every value: give {name} as a list, or its"
                        " range with a step"
                    )

    def identity(self) -> dict[str, Any]:
        """Plain values. Where the data lies and how it is computed may differ between workers."""
        config = to_dict(self.config)
        for name in ("data", "device", "threads", "norm"):
            del config[name]
        names = ("norms", "sampler", "pruner", "space")
        return json.loads(json.dumps({n: getattr(self, n) for n in names} | {"config": config}))

    def changes(self, other: dict[str, Any]) -> str:
        """In what another identity differs, in words; empty if it does not."""
        a, b = flat(other), flat(self.identity())
        changed = [k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
        if "config.recipe" in changed:
            changed = ["config.recipe"]
        return ", ".join(
            f"{k.removeprefix('config.')} was {a.get(k)}, is now {b.get(k)}" for k in changed
        )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {**self.identity(), "config": to_dict(self.config)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Plan":
        """In another process."""
        config, norms = read_config(values["config"]), tuple(values["norms"])
        return Plan(config, values["space"], norms, values["sampler"], values["pruner"])


def open_storage(url: str, heartbeat: int = 60) -> BaseStorage:
    """sqlite:///FILE, postgresql://… or journal:FILE; UserError if it cannot be reached."""
    if url.startswith("journal:"):
        return _journal(Path(url.removeprefix("journal:")))
    if "://" not in url:
        raise UsageError(
            f"--storage {url!r} is none of sqlite:///FILE, journal:FILE,"
            " postgresql://USER@HOST/DATABASE"
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
        raise ValueError("a database in memory is nobody else's; name a file")
    options = {"timeout": 60} if scheme.startswith("sqlite") else {"connect_timeout": 10}
    for attempt in range(5):
        try:
            with _quiet():
                return RDBStorage(
                    url,
                    engine_kwargs={"connect_args": options, "pool_pre_ping": True},
                    heartbeat_interval=heartbeat,
                    grace_period=GRACE * heartbeat,
                )
        except DBAPIError as error:
            # Two workers that make the tables at once: the slower one finds them made.
            message = str(error).lower()
            if attempt == 4 or not ("already exists" in message or "unique" in message):
                raise
            time.sleep(0.2 * (attempt + 1))
    raise AssertionError("the last attempt returns or raises")


def _journal(path: Path) -> BaseStorage:
    try:
        if path.exists():
            with open_regular(path) as file:
                json.loads(file.readline() or b"{}")
            _mend(path)
        return JournalStorage(JournalFileBackend(str(path)))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"the journal {path} cannot be opened: {reason}") from None
    # Optuna plays the file back and trips over whatever is not its own.
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise UserError(f"{path} is not a journal of Optuna's: not touching it") from None


def _mend(path: Path) -> None:
    """A writer that was killed left half a line, which the next one would write on."""
    if read_regular(path)[-1:] in (b"", b"\n"):
        return
    lock = JournalFileSymlinkLock(str(path))
    lock.acquire()  # whoever is just writing comes first
    try:
        content = read_regular(path)
        if content[-1:] != b"\n":
            with open(path, "r+b", opener=following_no_link) as file:
                file.truncate(content.rfind(b"\n") + 1)
            notice(f"{path} is cut off: its last line is left out, and done again")
    finally:
        lock.release()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Optuna calls heartbeats experimental at every step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


class Study:
    """One study, as one worker sees it."""

    def __init__(self, name: str, url: str, plan: Plan, count: int, heartbeat: int = 60) -> None:
        """Begin the study or join it; UserError if there is another one under its name."""
        self.name, self.plan, self.count, self.heartbeat = name, plan, count, heartbeat
        self._opened = open_storage(url, heartbeat)
        self.storage = optuna.storages.get_storage(self._opened)
        journal = url.startswith("journal:")
        self.locks = Path(f"{url.removeprefix('journal:')}.locks") if journal else None
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
        with _quiet():
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
        if self.heartbeat > study.user_attrs.get(HEARTBEAT, 0):
            study.set_user_attr(HEARTBEAT, self.heartbeat)
        return study

    @staticmethod
    def _identity_of(study: optuna.Study) -> dict[str, Any] | None:
        # Somebody may have made the study a moment ago and not said yet what it is about.
        for _ in range(20):
            if IDENTITY in study.user_attrs:
                return study.user_attrs[IDENTITY]
            if study.get_trials(deepcopy=False):
                break
            time.sleep(0.1)
        return None

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """The trials of our slots in these states, or in any."""
        every = self.optuna.get_trials(deepcopy=False, states=states or None)
        return [t for t in every if t.user_attrs.get(SLOT, self.count) < self.count]

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
        with _quiet():
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
            slowest = self.optuna.user_attrs.get(HEARTBEAT, self.heartbeat)
            self._opened.grace_period = GRACE * slowest
            with _quiet():
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
        if self.locks is None:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            if self.locks is None:
                thread.join()
            else:
                self._unlock(trial.number)

    def _sign(self, trial_id: int, number: int) -> bool:
        if self.locks is not None:
            return self._lock(number)
        try:
            self._record(trial_id)
        except (SQLAlchemyError, StorageInternalError):
            return False  # somebody else signs this one at this moment
        return True

    def _record(self, trial_id: int) -> None:
        with _quiet():
            self.storage.record_heartbeat(trial_id)  # type: ignore[attr-defined]

    def _lock(self, number: int) -> bool:
        """A journal has no heartbeat; the system gives up the locks of a dead process."""
        assert self.locks is not None
        self.locks.mkdir(parents=True, exist_ok=True)
        lock = try_lock(self.locks / f"{quote(self.name, safe='')}-{number}")
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


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """A storage that fails in the middle, as one sentence."""
    try:
        yield
    except (StorageInternalError, DBAPIError) as error:
        cause = error.__cause__ or error
        reason = str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]
        raise UserError(f"the storage does not answer any more: {reason}") from None
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        # Of Optuna's: it believes its storage, and trips over what is damaged there.
        places = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        own = max(i for i, place in enumerate(places) if f"{os.sep}normrnn{os.sep}" in place)
        if not any(f"{os.sep}optuna{os.sep}" in place for place in places[own:]):
            raise
        raise UserError(f"the storage is damaged ({type(error).__name__}: {error})") from None
