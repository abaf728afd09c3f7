"""One lock for all: exclusive, given up, and through no symbolic link."""

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from normrnn.files import exclusive, is_held

HOLD = (
    "import sys, pathlib; from normrnn.files import exclusive\n"
    "with exclusive(pathlib.Path(sys.argv[1]), RuntimeError()):\n"
    "    print(True, flush=True)\n"
    "    sys.stdin.read()\n"
)


def test_one_process_at_a_time_until_it_ends(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert is_held(path)
        with pytest.raises(RuntimeError, match="busy"), exclusive(path, RuntimeError("busy")):
            pass
        other.kill()
        other.wait()
    assert not is_held(path)
    with exclusive(path, RuntimeError("busy")):
        assert is_held(path)
    assert not is_held(path)


def test_no_link_is_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    (tmp_path / ".lock").symlink_to(target)
    for content in (None, "kept"):
        if content:
            target.write_text(content)
        lock = exclusive(tmp_path / ".lock", RuntimeError("busy"))
        with pytest.raises(OSError, match="symbolic links"), lock:
            pass
        assert (target.read_text() if target.exists() else None) == content


def test_is_held_does_not_block_others(tmp_path: Path) -> None:
    """Asking holds the file shared for a moment; whoever wants it waits that long."""
    path = tmp_path / ".lock"
    path.touch()
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        release = threading.Timer(0.05, fcntl.flock, (file, fcntl.LOCK_UN))
        release.start()
        with exclusive(path, RuntimeError("busy")):
            assert is_held(path)
        release.join()
