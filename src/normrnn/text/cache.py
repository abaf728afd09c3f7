"""Texts as ids on disk, made once and mapped by whoever reads them: ranks, arms, later commands.

An entry is a folder under its key in the user's cache directory, there whole or not at all: made
beside it and moved. As with compiled code, only what the user alone could have put there is taken,
and what is not what was written, by its hashes, is made again.
"""

import atexit
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from normrnn.errors import UserError, notice
from normrnn.ops.native.build import open_to_others, ours

LARGEST = 16 * 2**30
"""Bytes that entries may take together; those used longest ago go."""
_CONTENTS = "contents.json"
_FORMAT = "normrnn text 2"


def folder() -> Path:
    """Where entries are."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "normrnn" / "texts"


def entry(key: str, make: Callable[[Path], None]) -> Path:
    """The folder of `key`, in which `make` has written some files, now or before."""
    try:
        place = folder()
    except RuntimeError:  # no HOME, and the user is not in the password database
        return _for_now(make, "there is no home directory for a cache (XDG_CACHE_HOME names one)")
    lock = FileLock(place / f"{key}.lock")
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        unsafe = open_to_others(place)
        if unsafe is not None:
            return _for_now(make, f"others can write to {unsafe}")
        lock.acquire()  # others wait: what they need is being made
    except OSError as error:
        return _for_now(make, f"{place} cannot be used ({error.strerror})")
    try:
        for leftover in place.glob(f".{key}.*.tmp"):  # of one that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        found = place / key
        if _good(found):
            os.utime(found)
            return found
        shutil.rmtree(found, ignore_errors=True)
        made = place / f".{key}.{secrets.token_hex(8)}.tmp"
        try:
            made.mkdir(mode=0o700)
            make(made)
            _seal(made)
            made.rename(found)
        except OSError as error:
            raise UserError(
                f"{place} cannot hold the text as ids: {error.strerror or error};"
                " XDG_CACHE_HOME names another place"
            ) from None
        finally:
            shutil.rmtree(made, ignore_errors=True)
    finally:
        lock.release()
    _make_room(place, keep=found)
    return found


def _for_now(make: Callable[[Path], None], why: str) -> Path:
    """Made for this process alone."""
    notice(f"{why}: the text is encoded for this time only")
    made = Path(tempfile.mkdtemp(prefix="normrnn-text-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    make(made)
    return made


def _seal(made: Path) -> None:
    """Through to the disk, with the hash of each file."""
    hashes = {}
    for path in sorted(made.iterdir()):
        path.chmod(0o600)
        with path.open("rb") as file:
            os.fsync(file.fileno())
            hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    with (made / _CONTENTS).open("w") as file:
        json.dump({"format": _FORMAT, "sha256": hashes}, file)
        file.flush()
        os.fsync(file.fileno())
    (made / _CONTENTS).chmod(0o600)


def _good(found: Path) -> bool:
    """Whether a folder is ours and holds what was written."""
    try:
        if open_to_others(found) is not None or not ours(found / _CONTENTS):
            return False
        contents = json.loads((found / _CONTENTS).read_text())
        names = {path.name for path in found.iterdir()} - {_CONTENTS}
        if contents["format"] != _FORMAT or names != set(contents["sha256"]):
            return False
        return all(_is(found / name, hash) for name, hash in contents["sha256"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _is(path: Path, sha256: str) -> bool:
    if not ours(path):
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def _make_room(place: Path, keep: Path) -> None:
    """Who has an entry mapped keeps it, whatever its name."""
    sizes = {}
    for path in place.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            with contextlib.suppress(OSError):
                size = sum(file.stat().st_size for file in path.iterdir())
                sizes[path] = (path.stat().st_mtime, size)
    total = sum(size for _, size in sizes.values())
    for path, (_, size) in sorted(sizes.items(), key=lambda item: item[1]):
        if total <= LARGEST:
            return
        if path != keep:
            shutil.rmtree(path, ignore_errors=True)
            total -= size
