"""A run as a process of its own, or as several that train it together.

`python -m normrnn.engine.launch K MODULE ARGUMENTS… < order` starts the module K times, as torchrun
does on one machine; each process is given the order. No torch before that.
"""

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from normrnn.config.base import Config
from normrnn.config.jsonio import to_dict
from normrnn.processes import PARENT, Child, hand_over, stop_with_parent
from normrnn.runs.names import LOG

WORKER = "normrnn.commands.worker"
LAUNCHER = "normrnn.engine.launch"
DIVERGED = 3
"""Exit code of a run whose loss is no finite number any more."""
_LOOPBACK = "lo"


def start_run(config: Config, out: Path, processes: int = 1, options: Sequence[str] = ()) -> Child:
    """Begin, or go on with, the run in `out`; what it says is in its log."""
    order = json.dumps(to_dict(config)).encode()
    arguments = [str(out), *options]
    if processes == 1:
        return Child(WORKER, arguments, order, out / LOG, config.threads or 1)
    launched = [str(processes), WORKER, *arguments]
    return Child(LAUNCHER, launched, order, out / LOG, config.threads or 1)


def main(arguments: Sequence[str]) -> int:
    """The exit code of the processes that were started."""
    processes, module, *rest = arguments
    stop_with_parent()
    hand_over(sys.stdin.buffer.read())
    os.environ[PARENT] = str(os.getpid())
    if Path("/sys/class/net", _LOOPBACK).exists():  # they are all here
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable()  # our processes say themselves why they end
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(processes),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=str(os.getpid()),
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", module, *rest)
    except ChildFailedError as error:
        # Those that others took along have a code of 1 or the number of a signal, negative.
        codes = [failure.exitcode for failure in error.failures.values()]
        return max((code for code in codes if code > 0), default=128 - min(codes))
    except (SignalException, KeyboardInterrupt):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
