"""Start a run as one process, or as several on this machine that train it together.

`python -m normrnn.engine.launch K MODULE ARGUMENTS… < order` starts the module K times and gives
each process the order and its rank. The processes find each other through a file that only this
user can open, and talk over the loopback interface: no port is open to other machines. Processes
started by torchrun are recognised too. No torch is imported here.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from normrnn.config.base import Config
from normrnn.config.jsonio import to_dict
from normrnn.config.registry import handed_over
from normrnn.errors import UserError
from normrnn.processes import Child, ended_politely, start_python, stop, stop_with_parent
from normrnn.runs.records import LOG

WORKER = "normrnn.experiments.worker"
DIVERGED, BUSY = 3, 4
"""Exit codes of a run whose loss is no longer finite, and of one that another process trains."""
STORE = "NORMRNN_STORE"
"""Environment variable: the file through which the processes of a run find each other."""
_GRACE = 30.0
"""Seconds that the other processes have to end after one has failed."""


def start_run(config: Config, out: Path, processes: int = 1, options: Sequence[str] = ()) -> Child:
    """Start or resume the run in `out`; its output goes to its log.

    `options` are the names of row logs. The process gets the import paths that this one was given.
    """
    order = json.dumps({"config": to_dict(config), "imports": handed_over()}).encode()
    module, arguments = WORKER, [str(out), *options]
    if processes > 1:
        module, arguments = __name__, [str(processes), WORKER, *arguments]
    return Child(module, arguments, order, out / LOG, config.threads or 1)


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
    with ended_politely(), tempfile.TemporaryDirectory(prefix="normrnn-") as folder:
        shared = {
            STORE: str(Path(folder, "store")),
            "WORLD_SIZE": count,
            "GLOO_SOCKET_IFNAME": loopback,
            "NCCL_SOCKET_IFNAME": loopback,
        }
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in map(str, range(int(count))):
                variables = {"RANK": rank, "LOCAL_RANK": rank, **shared}
                processes.append(start_python(module, rest, order, environment=variables))
            while (codes := {p.poll() for p in processes}) <= {None, 0} and None in codes:
                time.sleep(0.1)
        except KeyboardInterrupt:
            stop(processes)  # they write their checkpoint first
            return 130
        stop(processes, _GRACE)
    # Of those that ended first: processes that lost another end with code 1.
    ended = [code or 0 for code in codes]
    if (number := -min(ended)) > 0:
        print(f"normrnn: a process of this run was ended by signal {number}", file=sys.stderr)
        return 128 + number
    return max(ended)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
