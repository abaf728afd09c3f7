"""How soon a run makes its first update, and what memory it takes epoch after epoch.

    python -m benchmarks.start DIR [--epochs 8] [--tokens 40000]

DIR holds a text as `normrnn train ptb-small --data DIR` takes it, Penn Treebank for the figures
asked for: the first update within 5 s of the import, memory flat over epochs. Epochs are cut
short; everything else is the recipe's, frame-wise.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

from benchmarks.machine import describe, resident  # noqa: E402
from normrnn.cli import guarded  # noqa: E402
from normrnn.engine.display import Status  # noqa: E402
from normrnn.engine.start import train  # noqa: E402
from normrnn.recipes.ptb import ptb_small  # noqa: E402

IMPORTED = time.perf_counter()


class Recorder:
    """A display that keeps times and sizes."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.sizes: dict[int, float] = {}

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, status: Status) -> None:  # noqa: ARG002
        self.first = self.first or time.perf_counter()

    def row(self, row: dict[str, Any]) -> None:
        self.sizes[row["epoch"]] = resident()  # that of the epoch's last row stays


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40_000)
    args = parser.parse_args(arguments)
    config = ptb_small()
    config = replace(
        config,
        data=args.directory,
        norm="frame",
        epochs=args.epochs,
        threads=1,
        train=replace(config.train, epoch_tokens=args.tokens),
        evaluation=replace(config.evaluation, tokens=args.tokens, train_tokens=args.tokens),
    )
    seen = Recorder()
    with tempfile.TemporaryDirectory() as where:
        begin = time.perf_counter()
        train(config, Path(where) / "run", lambda *_: seen, say=lambda _: None)
    assert seen.first is not None
    print(describe())
    print(f"import {IMPORTED - STARTED:.1f} s, then {seen.first - begin:.1f} s to the first update")
    sizes = ", ".join(f"{size:,.0f}" for size in seen.sizes.values())
    print(f"MiB resident at the end of each epoch: {sizes}")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))
