"""Child processes: their output goes to a file, and they end with their parent.

`python -m normrnn.processes K MODULE ARGUMENTS… < order` starts the module K times, to train one
run together, and gives each the order and its rank. They find each other through a file that
only this user can open, and talk over the loopback interface: no port is open to other machines.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from normrnn.errors import BusyError, UserError
from normrnn.files import following_no_link, open_regular

# Exit codes: the loss is not finite; another process trains the run.
DIVERGED, BUSY = 3, BusyError.code
# Environment variables: the file through which the processes of a run find each other, and the
# process to end with.
STORE, PARENT = "NORMRNN_STORE", "NORMRNN_PARENT"
# Variables of torchrun: children are not among the processes that it started.
_OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_GRACE = 30.0  # seconds that the others have to end after one process of a run has failed


def start_python(
    module: str,
    arguments: Sequence[str],
    order: bytes,
    output: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a Python module with `order` on standard input; nothing is imported from the current
    directory, which may hold other people's files. Without `output` it shares ours."""
    inherited = {k: v for k, v in os.environ.items() if k not in _OF_RANKS}
    process = subprocess.Popen(
        [sys.executable, "-u", "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        # A session of its own: Ctrl-C in the terminal reaches this process only, which passes it on
        start_new_session=True,
        env={**inherited, **(environment or {}), PARENT: str(os.getpid()), "PYTHONSAFEPATH": "1"},
    )
    assert process.stdin is not None
    # A process that dies before reading has the reason in its log.
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(order)
    return process


class Child:
    """A Python module in a process of its own, its output in the file `log`."""

    def __init__(
        self, module: str, arguments: Sequence[str], order: bytes, log: Path, threads: int = 1
    ) -> None:
        """Start it with `order` on standard input and `threads` threads, which override the
        environment."""
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        counts = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with open(log, "ab", opener=following_no_link) as output:
            self._start = output.tell()
            self._process = child = start_python(module, arguments, order, output, counts)
        self.wait, self.kill, self.terminate = child.wait, child.kill, child.terminate

    @property
    def code(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._process.poll()

    def failure_reason(self) -> str:
        """Return why it ended: its last line of output, or the signal."""
        if (code := self.code or 0) < 0:
            return f"was ended by signal {-code}"
        with open_regular(self.log) as file:
            file.seek(self._start)
            lines = file.read().decode("utf-8", "replace").splitlines()
        spoken = [line for line in lines if line.strip()]
        return spoken[-1].removeprefix("normrnn: ") if spoken else f"ended with code {code}"


def stop(children: Sequence[Child | subprocess.Popen[bytes]], seconds: float | None = None) -> None:
    """Ask those that still run to save their state and end; kill them after `seconds` (None: wait).

    By SIGTERM: children of a background job of a shell ignore SIGINT.
    """
    for child in children:
        child.terminate()
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
        child.kill()
        child.wait()


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt, so that child processes are stopped too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop_with_parent() -> None:
    """End this process, by SIGTERM, when its parent ends.

    The parent passes its process id: it may have ended before the child could ask for it.
    """
    parent = int(os.environ.get(PARENT) or os.getppid())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def usable_cores() -> int:
    """Return the number of cores that this process may use: by its affinity."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def rank_and_size(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the rank of this process and the number of processes that were started with it.

    A process that neither torchrun nor `main` started is alone, whatever `RANK` says.
    """
    together = STORE in environment or {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys()
    if not together or not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return 0, 1
    with contextlib.suppress(ValueError):
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        if 0 <= rank < size:
            return rank, size
    raise UserError("RANK and WORLD_SIZE in the environment are not those of a launcher")


def main(arguments: Sequence[str]) -> int:
    """Start the processes, wait for them and return their exit code."""
    count, module, *rest = arguments
    stop_with_parent()
    order = sys.stdin.buffer.read()
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    with sigterm_as_interrupt(), tempfile.TemporaryDirectory(prefix="normrnn-") as folder:
        shared = {
            STORE: str(Path(folder, "store")),
            "WORLD_SIZE": count,
            "GLOO_SOCKET_IFNAME": loopback,
            "NCCL_SOCKET_IFNAME": loopback,
        }
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in map(str, range(int(count))):
                variables = {"RANK": rank, "LOCAL_RANK": rank, **shared}
                ranks.append(start_python(module, rest, order, environment=variables))
            while (codes := {p.poll() for p in ranks}) <= {None, 0} and None in codes:
                time.sleep(0.1)
        except KeyboardInterrupt:
            stop(ranks)  # they write their checkpoint first
            return 130
        stop(ranks, _GRACE)
    # Of those that ended first: processes that lost another end with code 1.
    ended = [code or 0 for code in codes]
    if (number := -min(ended)) > 0:
        print(f"normrnn: a process of this run was ended by signal {number}", file=sys.stderr)
        return 128 + number
    return max(ended)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
