"""A run of a comparison as a process: `python -m normrnn.experiments.worker DIR < order.json`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from normrnn.cli import guarded
from normrnn.config.base import Config
from normrnn.config.extensions import receive
from normrnn.engine.launch import BUSY, DIVERGED
from normrnn.engine.loop import Diverged
from normrnn.experiments.functions import call_in_worker
from normrnn.experiments.training import train_until_stopped
from normrnn.processes import stop_with_parent
from normrnn.recipes import read_config
from normrnn.runs.store import BusyError


def run(arguments: list[str]) -> int:
    """Run the order on standard input, a config or a call of a function, in the directory named;
    130 if it was asked to stop."""
    stop_with_parent()
    order = json.load(sys.stdin)
    receive(order.pop("imports"))
    out = Path(arguments[0])
    if "function" in order:
        call_in_worker(order, out)
        return 0
    config = read_config(order["config"])
    return _train(config, out, arguments[1:])


def _train(config: Config, out: Path, logs: Sequence[str]) -> int:
    try:
        return train_until_stopped(config, out, logs)
    except Diverged as error:
        error.code = DIVERGED  # of every process, not only of the one that reports it
        raise
    except BusyError as error:
        error.code = BUSY
        raise


if __name__ == "__main__":
    sys.exit(guarded(run, sys.argv[1:]))
