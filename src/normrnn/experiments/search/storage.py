"""Where a study is kept, opened: a database or a journal; and what goes wrong there, in words."""

import contextlib
import json
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import optuna
from filelock import FileLock
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from normrnn.errors import UsageError, UserError, notice
from normrnn.files import ROWS, SETTINGS, following_no_link, open_regular, read_regular
from normrnn.locks import try_lock

GRACE = 3
"""A worker is dead after this many heartbeats without a sign."""

_PACKAGE = Path(__file__).parents[1]
_OPTUNA = Path(optuna.__file__).parent

optuna.logging.set_verbosity(optuna.logging.ERROR)


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
            with quiet():
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
                json.loads(file.readline(SETTINGS) or b"{}")
            _mend(path)
        return JournalStorage(JournalFileBackend(str(path), _JournalLock(path)))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"the journal {path} cannot be opened: {reason}") from None
    # Optuna plays the file back and trips over whatever is not its own.
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise UserError(f"{path} is not a journal of Optuna's: not touching it") from None


def journal_locks(path: Path) -> Path:
    """Return the directory for the locks of a journal, made if it is missing; UserError for a
    symbolic link, through which files would be written elsewhere."""
    folder = Path(f"{path}.locks")
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink():
        raise UserError(f"{folder} is a symbolic link: not writing through it")
    return folder


class _JournalLock(JournalFileOpenLock):
    """A lock that the system releases when its holder dies; Optuna's own, a symbolic link, stays
    behind and blocks every later search."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: FileLock | None = None

    def acquire(self) -> bool:
        self._held = try_lock(journal_locks(self._path) / "journal", patience=-1)
        return True

    def release(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None


def _mend(path: Path) -> None:
    """A writer that was killed left half a line, which the next one would write on."""
    if read_regular(path, ROWS)[-1:] in (b"", b"\n"):
        return
    lock = _JournalLock(path)
    lock.acquire()  # whoever is just writing comes first
    try:
        content = read_regular(path, ROWS)
        if content[-1:] != b"\n":
            with open(path, "r+b", opener=following_no_link) as file:
                file.truncate(content.rfind(b"\n") + 1)
            notice(f"{path} is cut off: its last line is left out, and done again")
    finally:
        lock.release()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Optuna calls heartbeats experimental at every step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


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
        places = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
        own = max(i for i, place in enumerate(places) if place.is_relative_to(_PACKAGE))
        if not any(place.is_relative_to(_OPTUNA) for place in places[own:]):
            raise
        raise UserError(f"the storage is damaged ({type(error).__name__}: {error})") from None
