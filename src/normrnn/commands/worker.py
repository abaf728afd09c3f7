"""One arm of a comparison as a process: `python -m normrnn.commands.worker DIR < config.json`."""

import json
import sys
from pathlib import Path

from normrnn.cli import guarded
from normrnn.commands.train import said_once, train_and_report
from normrnn.config.base import Config
from normrnn.engine.launch import DIVERGED
from normrnn.engine.loop import Diverged
from normrnn.processes import stop_with_parent
from normrnn.recipes import read_config


def run(arguments: list[str]) -> int:
    """Train the config that was ordered in the directory named."""
    stop_with_parent()
    config, out = read_config(json.load(sys.stdin)), Path(arguments[0])
    return said_once(lambda: _train(config, out, "--tensorboard" in arguments[1:]))


def _train(config: Config, out: Path, tensorboard: bool) -> int:
    try:
        return train_and_report(config, out, tensorboard)
    except Diverged as error:
        error.code = DIVERGED  # of every process, also of those that say nothing
        raise


if __name__ == "__main__":
    sys.exit(guarded(run, sys.argv[1:]))
