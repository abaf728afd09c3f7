"""Processes that this one starts: a file for what they say, and an end with their parent."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from normrnn.files import following_no_link, open_regular

PARENT = "NORMRNN_PARENT"
"""Environment variable: the process to end with."""
_ORDER = "NORMRNN_ORDER"
QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Child:
    """A Python module in a process of its own, its output in the file `log`."""

    def __init__(
        self, module: str, arguments: Sequence[str], order: bytes, log: Path, threads: int = 1
    ) -> None:
        """Start it with `order` on standard input and `threads` threads, whatever the environment
        says: who starts several processes shares the cores out."""
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        with open(log, "ab", opener=following_no_link) as output:
            self._start = output.tell()
            # A session of its own: Ctrl-C in the terminal reaches only us, who pass it on once.
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | counts | {PARENT: str(os.getpid())},
            )
        assert self._process.stdin is not None
        # Who dies before reading says why in its log.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(order)

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def interrupt(self) -> None:
        """Ask it to save what it has and end. By SIGTERM: a shell that starts us in the background
        has SIGINT ignored, and then so have our children until they can save anything."""
        if self.code is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Until it has ended."""
        self._process.wait()

    def last_words(self) -> str:
        """Why it ended."""
        code = self.code
        if code is not None and code < 0:
            return f"was ended by signal {-code}"
        with open_regular(self.log) as file:
            file.seek(self._start)
            lines = file.read().decode("utf-8", "replace").splitlines()
        spoken = [line for line in lines if line.strip()]
        return spoken[-1].removeprefix("normrnn: ") if spoken else f"ended with code {code}"


def stop(children: Sequence[Child]) -> None:
    """Ask those that still run to save what they have, and wait until they have."""
    for child in children:
        child.interrupt()
    for child in children:
        child.wait()


@contextlib.contextmanager
def ended_politely() -> Iterator[None]:
    """Inside, SIGTERM is a Ctrl-C: whoever ends us politely means our processes too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def hand_over(order: bytes) -> None:
    """To all processes that this one starts: of them only one could read it from a pipe."""
    os.environ[_ORDER] = order.decode()


def given_order() -> str:
    """What a child was told: on standard input, or by a parent that had it there."""
    order = os.environ.pop(_ORDER, None)
    return sys.stdin.read() if order is None else order


def stop_with_parent() -> None:
    """Called by a child: a parent that was killed takes it along; its checkpoint stays.

    The parent tells its number: a child may ask for it too late.
    """
    parent = int(os.environ.get(PARENT) or os.getppid())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def usable_cores() -> int:
    """The cores that this process may use: its affinity, and its group's quota where one is set."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(cores, _quota() or cores)


def _quota() -> int | None:
    """Whole cores of the control group's quota, at least one; None without one."""
    try:
        allowed, period = QUOTA.read_text(encoding="ascii").split()
        return max(1, math.floor(int(allowed) / int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        return None
