"""A study in a database that any number of commands share.

A study of N trials has N slots, each one setting. A slot is queued as an Optuna trial, and its
setting is drawn when a worker takes it. Optuna's heartbeat fails the trial of a worker that ended;
the slot is then queued again with the same setting. So every slot is done once.
"""

import contextlib
import hashlib
import json
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from normrnn.config.base import Config
from normrnn.config.jsonio import differences, flat, to_dict
from normrnn.errors import UsageError, UserError, notice
from normrnn.experiments.search.space import Space

# Not CmaEsSampler: it keeps its state in the storage as a pickle, and unpickles what it finds.
SAMPLERS = {"random": "RandomSampler", "tpe": "TPESampler", "bruteforce": "BruteForceSampler"}
PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "hyperband": "HyperbandPruner",
    "successivehalving": "SuccessiveHalvingPruner",
}
GRACE = 3
"""A worker counts as dead after this many heartbeats without a sign."""
SLOT, ARMS, SHA256 = "slot", "arms", "sha256"
"""User attributes of a trial: its slot, the results of its variants, a hash of both."""
IDENTITY, HEARTBEAT = "normrnn", "heartbeat"
"""User attributes of a study: its plan, and its heartbeat."""
DONE = (TrialState.COMPLETE, TrialState.PRUNED)
_NOT_SHARED = ("data", "device", "threads", "norm")
"""Settings that differ between workers, or between norms."""
_PACKAGE = Path(__file__).parents[2]
_OPTUNA = Path(optuna.__file__).parent

optuna.logging.set_verbosity(optuna.logging.CRITICAL)  # errors are raised


@dataclass(frozen=True)
class Plan:
    """What a study searches; commands share a study only if their plans agree."""

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
        fields = flat(to_dict(self.config))
        for name, values in self.space.items() if self.sampler == "bruteforce" else ():
            is_range = isinstance(values, dict) and values.get("step") is None
            if is_range and type(fields[name]) is float:
                raise UsageError(
                    f"the sampler bruteforce tries every value: give {name} as a list, or its"
                    " range with a step"
                )

    def identity(self) -> dict[str, Any]:
        """Return plain values, without what may differ between workers: paths, threads, devices."""
        names = ("norms", "sampler", "pruner", "space")
        config = {k: v for k, v in to_dict(self.config).items() if k not in _NOT_SHARED}
        return json.loads(json.dumps({n: getattr(self, n) for n in names} | {"config": config}))

    def changes(self, other: dict[str, Any]) -> str:
        """Return in words how another identity differs; empty if it does not."""
        changed = differences(other, self.identity())
        if "config.recipe" in changed:
            changed = {"": changed["config.recipe"]}
        return ", ".join(changed[name].removeprefix("config.") for name in sorted(changed))


def open_storage(url: str) -> RDBStorage:
    """Open sqlite:///FILE or postgresql://…; UserError if it cannot be reached."""
    warnings.filterwarnings("ignore", category=ExperimentalWarning)  # of heartbeats
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise UsageError(
            f"--storage {url!r} is none of sqlite:///FILE, postgresql://USER@HOST/DATABASE"
        )
    try:
        if scheme in ("postgres", "postgresql"):
            url = f"postgresql+psycopg://{rest}"
        is_file = scheme.startswith("sqlite")
        if is_file and make_url(url).database in (None, "", ":memory:"):
            raise ValueError("workers cannot share a database in memory; name a file")
        options = {"timeout": 60} if is_file else {"connect_timeout": 10}
        engine = {"connect_args": options, "pool_pre_ping": True}
        with contextlib.suppress(DBAPIError):
            # Of two commands that create the tables at once, the second finds them at the next try.
            return RDBStorage(url, engine_kwargs=engine, heartbeat_interval=60)
        return RDBStorage(url, engine_kwargs=engine, heartbeat_interval=60)
    except DBAPIError as error:
        address = make_url(url).render_as_string(hide_password=True)
        reason = str(error.orig).strip().splitlines()[0]
        raise UserError(f"the storage {address} cannot be reached: {reason}") from None
    except (ArgumentError, NoSuchModuleError, ImportError, ValueError) as error:
        raise UsageError(f"--storage {scheme}://… cannot be used: {error}") from None
    except (SQLAlchemyError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the storage {scheme}://… cannot be used: {reason}") from None


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
        last = max(i for i, place in enumerate(places) if place.is_relative_to(_PACKAGE))
        if not any(place.is_relative_to(_OPTUNA) for place in places[last:]):
            raise
        raise UserError(f"the storage is damaged ({type(error).__name__}: {error})") from None


class TrialTakenError(Exception):
    """A trial whose slot another worker has: two workers may queue a slot at the same time."""


class Study:
    """One study, as one command sees it; its threads may use it together."""

    def __init__(self, name: str, url: str, plan: Plan, count: int, heartbeat: int = 60) -> None:
        """Begin or join the study; UserError if another one has its name."""
        self.name, self.plan, self.count = name, plan, count
        self.storage = open_storage(url)
        with storage_errors():
            study = self._connect()
            found = study.user_attrs
            if not isinstance(found.get(IDENTITY), dict):
                if study.get_trials(deepcopy=False):
                    raise UserError(
                        f"the study {self.name!r} in this storage is not one of normrnn search"
                    )
                study.set_user_attr(HEARTBEAT, heartbeat)
                study.set_user_attr(IDENTITY, plan.identity())
            elif changes := plan.changes(found[IDENTITY]):
                raise UserError(
                    f"the study {self.name!r} in this storage has other settings ({changes}): use"
                    " another --study or --storage"
                )
            known = found.get(HEARTBEAT)
        # All workers keep the heartbeat of the first: a slower one would count as dead.
        self.heartbeat = known if type(known) is int and known > 0 else heartbeat
        self.storage.heartbeat_interval = self.heartbeat
        self.storage.grace_period = GRACE * self.heartbeat

    def close(self) -> None:
        """Close the database."""
        self.storage.remove_session()
        self.storage.engine.dispose()

    def _connect(self) -> optuna.Study:
        """Return the study with a sampler of its own, for one thread."""
        pruner = getattr(optuna.pruners, PRUNERS[self.plan.pruner])()
        return optuna.create_study(
            storage=self.storage, study_name=self.name, pruner=pruner, load_if_exists=True
        )

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials of our slots in these states, or in any."""
        every = self._connect().get_trials(deepcopy=False, states=states or None)
        slots = range(self.count)
        return [t for t in every if type(s := t.user_attrs.get(SLOT)) is int and s in slots]

    def done(self) -> dict[int, FrozenTrial]:
        """Return slot -> the trial that finished it."""
        return {t.user_attrs[SLOT]: t for t in reversed(self.trials(*DONE))}

    def fill_queue(self, excluded: Collection[int] = ()) -> None:
        """Queue every slot that is neither done, nor running, nor queued: also those of workers
        that ended."""
        optuna.storages.fail_stale_trials(study := self._connect())
        taken, drawn = set(excluded), {}
        for trial in self.trials():
            slot = trial.user_attrs[SLOT]
            if trial.state != TrialState.FAIL:
                taken.add(slot)
            # The last trial of a slot may have ended before it drew anything.
            drawn.setdefault(slot, {}).update(trial.params)
        for slot in set(range(self.count)) - taken:
            study.enqueue_trial(drawn.get(slot, {}), user_attrs={SLOT: slot})

    def run_next(
        self, objective: Callable[[Trial], dict[str, Any]], excluded: Collection[int] = ()
    ) -> bool:
        """Run a trial that waits; return False if none does.

        The objective returns the results of all variants, or raises TrialPruned; another exception
        fails the trial and is raised. Its slot is queued again unless it is `excluded`.
        """
        self.fill_queue(excluded)
        waiting = self.trials(TrialState.WAITING)
        for trial in waiting:  # so that a death right after a claim is noticed
            self.storage.record_heartbeat(trial._trial_id)
        if not waiting:
            return False
        study, failures = self._connect(), []

        def run(trial: Trial) -> float:
            slot = self._slot(trial)
            # Seeded by the slot: settings do not depend on which worker draws them.
            study.sampler = self._sampler(slot)
            arms: dict[str, Any] = {}
            try:
                with contextlib.suppress(optuna.TrialPruned):
                    arms = objective(trial)
                    trial.set_user_attr(ARMS, arms)
                trial.set_user_attr(SHA256, _digest(self.storage.get_trial(trial._trial_id)))
            except BaseException as error:
                failures.append(error)
                raise
            if not arms:
                raise optuna.TrialPruned
            return _value(arms)

        try:
            study.optimize(run, n_trials=1, catch=(TrialTakenError,))
        except (UpdateFinishedTrialError, ValueError):
            # The trial counted as dead, and another worker runs it.
            if failures and not isinstance(failures[0], UpdateFinishedTrialError):
                raise failures[0] from None
        return True

    def _slot(self, trial: Trial) -> int:
        slot = trial.user_attrs.get(SLOT)
        others = [t for t in self.trials(TrialState.RUNNING, *DONE) if t.number != trial.number]
        if slot is None or any(t.user_attrs[SLOT] == slot for t in others):
            raise TrialTakenError
        return slot

    def _sampler(self, slot: int) -> optuna.samplers.BaseSampler:
        seed = (self.plan.config.seed * 1_000_003 + slot) % 2**32
        return getattr(optuna.samplers, SAMPLERS[self.plan.sampler])(seed=seed)

    def rows(self) -> list[dict[str, Any]]:
        """Return the trial table: one row per finished slot."""
        rows = []
        for slot, trial in sorted(self.done().items()):
            if SHA256 not in trial.user_attrs:
                notice(f"the study {self.name!r} has trials without a checksum: not verified")
            elif trial.user_attrs[SHA256] != _digest(trial):
                raise UserError(f"trial {slot} in the storage is damaged: not what was written")
            arms = trial.user_attrs.get(ARMS, {})
            value = _value(arms)
            rows.append(
                {
                    "trial": slot,
                    "state": trial.state.name.lower(),
                    "value": value if value < float("inf") else None,
                    "settings": trial.params,
                    "arms": arms,
                }
            )
        return rows


def _value(arms: dict[str, Any]) -> float:
    """Return the objective: the lowest validation loss of the variants that trained."""
    return min((one["loss"] for one in arms.values() if not one["diverged"]), default=float("inf"))


def _digest(trial: FrozenTrial) -> str:
    """Return a hash of the setting and the results of a trial."""
    attrs = [trial.user_attrs.get(name) for name in (SLOT, ARMS)]
    return hashlib.sha256(json.dumps([trial.params, attrs], sort_keys=True).encode()).hexdigest()
