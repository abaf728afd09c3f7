"""One arm of a comparison as a process: `python -m normrnn.commands.worker DIR < config.json`."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from normrnn.cli import guarded
from normrnn.commands.train import train_and_report
from normrnn.recipes import read_config


def run(arguments: list[str]) -> int:
    """Train the config on standard input in the directory named."""
    _stop_with_parent()
    config = read_config(json.load(sys.stdin))
    return train_and_report(config, Path(arguments[0]), "--tensorboard" in arguments[1:])


def _stop_with_parent() -> None:
    """A comparison that was killed takes its arms along; their checkpoints stay."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(guarded(run, sys.argv[1:]))
