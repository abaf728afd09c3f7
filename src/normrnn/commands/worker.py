"""One arm of a comparison as a process: `python -m normrnn.commands.worker DIR < config.json`."""

import json
import sys
from pathlib import Path

from normrnn.cli import guarded
from normrnn.commands.jobs import DIVERGED
from normrnn.commands.train import train_and_report
from normrnn.engine.loop import Diverged
from normrnn.processes import stop_with_parent
from normrnn.recipes import read_config


def run(arguments: list[str]) -> int:
    """Train the config on standard input in the directory named."""
    stop_with_parent()
    config = read_config(json.load(sys.stdin))
    try:
        return train_and_report(config, Path(arguments[0]), "--tensorboard" in arguments[1:])
    except Diverged as error:
        print(f"normrnn: {error}", file=sys.stderr)
        return DIVERGED


if __name__ == "__main__":
    sys.exit(guarded(run, sys.argv[1:]))
