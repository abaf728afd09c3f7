"""A run of a comparison as a process: `python -m normrnn.experiments.worker DIR < order.json`."""

import json
import sys
from pathlib import Path

from normrnn.cli import guarded
from normrnn.config.registry import find, import_from_parent, read_config
from normrnn.engine.loop import Diverged
from normrnn.experiments.functions import FunctionJob
from normrnn.experiments.training import train_until_stopped
from normrnn.processes import BUSY, DIVERGED, stop_with_parent
from normrnn.runs.store import BusyError


def run(arguments: list[str]) -> int:
    """Run the order on standard input, a config or a call of a function, in the directory named;
    130 if it was asked to stop."""
    stop_with_parent()
    order = json.load(sys.stdin)
    import_from_parent(order["imports"])
    out = Path(arguments[0])
    try:
        if "call" in order:
            FunctionJob(out, order["call"]).run(find(order["call"]["recipe"]))
            return 0
        return train_until_stopped(read_config(order["config"]), out, arguments[1:])
    except (Diverged, BusyError) as error:  # of every process, not only of the one that reports it
        error.code = DIVERGED if isinstance(error, Diverged) else BUSY
        raise


if __name__ == "__main__":
    sys.exit(guarded(run, sys.argv[1:]))
