"""A run of a comparison as a process: `python -m normrnn.experiments.worker DIR < order.json`."""

import json
import sys
from pathlib import Path

from normrnn.cli import guarded
from normrnn.config.registry import find, import_from_parent, read_config
from normrnn.errors import UserError
from normrnn.experiments.functions import FunctionJob
from normrnn.experiments.training import train_until_stopped
from normrnn.processes import stop_with_parent


def run(arguments: list[str]) -> int:
    """Run the order on standard input, a config or a call of a function, in the directory named;
    130 if it was asked to stop."""
    stop_with_parent()
    order = json.load(sys.stdin)
    import_from_parent(order["imports"])
    out = Path(arguments[0])
    if "call" in order:
        name = order["call"]["recipe"]
        try:
            FunctionJob(out, order["call"]).run(find(name))
        except SystemExit as error:
            raise UserError(f"{name} called sys.exit({error.code})") from None
        return 0
    return train_until_stopped(read_config(order["config"]), out, arguments[1:])


if __name__ == "__main__":
    sys.exit(guarded(run, sys.argv[1:]))
