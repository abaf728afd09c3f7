"""How soon a run makes its first update, and what memory it takes epoch after epoch.

    python -m benchmarks.start DIR [--epochs 8] [--tokens 40000]
    python -m benchmarks.start --megabytes 500

DIR holds a text as `normrnn train ptb-small --data DIR` takes it, Penn Treebank for the figures
asked for: the first update within 5 s of the import, memory flat over epochs. Epochs are cut
short; everything else is the recipe's, frame-wise.

With `--megabytes` the text is made up, as large as that, its words as frequent as their rank is
low, two million of them; a new process trains until its first update.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

import numpy as np  # noqa: E402

from benchmarks.machine import describe, peak, resident  # noqa: E402
from normrnn.cli import guarded  # noqa: E402
from normrnn.engine.loop import train  # noqa: E402
from normrnn.recipes import ptb_small  # noqa: E402

IMPORTED = time.perf_counter()
VOCABULARY = 10_000
"""Of the network that reads a made-up text: that of Penn Treebank."""


class EnoughError(Exception):
    """The first update is done."""


class Recorder:
    """A callback that keeps times and sizes."""

    def __init__(self, once: bool = False) -> None:
        self.once = once
        self.first: float | None = None
        self.sizes: dict[int, float] = {}

    def __call__(self, row: dict[str, Any]) -> None:
        self.first = self.first or time.perf_counter()
        if self.once:
            raise EnoughError
        self.sizes[row["epoch"]] = resident()  # that of the epoch's last row stays


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", metavar="DIR", nargs="?", default="")
    parser.add_argument("--megabytes", type=int, default=0)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40_000)
    args = parser.parse_args(arguments)
    if args.megabytes:
        return large(args.megabytes)
    config = ptb_small()
    config = replace(
        config,
        data=args.directory,
        norm="frame",
        text=replace(config.text, max_vocab=VOCABULARY if args.once else 0),
        epochs=args.epochs,
        threads=1,
        train=replace(config.train, epoch_tokens=args.tokens, log_every=1),
        evaluation=replace(config.evaluation, tokens=args.tokens, train_tokens=args.tokens),
    )
    seen = Recorder(args.once)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as where, contextlib.suppress(EnoughError):
        train(config, Path(where) / "run", [seen])
    if args.once:
        print(json.dumps([time.perf_counter() - STARTED, peak()]))
        return 0
    assert seen.first is not None
    print(describe())
    print(f"import {IMPORTED - STARTED:.1f} s, then {seen.first - begin:.1f} s to the first update")
    sizes = ", ".join(f"{size:,.0f}" for size in seen.sizes.values())
    print(f"MiB resident at the end of each epoch: {sizes}")
    return 0


def write_text(path: Path, megabytes: int) -> None:
    """Lines of 20 words; the word of rank r comes about as often as 1/r."""
    rng, kinds = np.random.default_rng(1), 2_000_000
    with path.open("w", encoding="ascii") as file:
        while file.tell() < megabytes * 10**6:
            ranks = np.exp(rng.random(400_000) * np.log(kinds)).astype(np.int64).tolist()
            words = [f"w{rank}" for rank in ranks]
            lines = [" ".join(words[i : i + 20]) for i in range(0, len(words), 20)]
            file.write("\n".join(lines) + "\n")


def large(megabytes: int) -> int:
    """Start on a large text."""
    with tempfile.TemporaryDirectory() as where:
        text = Path(where) / "text.txt"
        write_text(text, megabytes)
        print(describe())
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.start", str(text), "--once"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        seconds, size = json.loads(done.stdout)
        print(
            f"start on {text.stat().st_size / 1e6:,.0f} MB of words: first update after"
            f" {seconds:.1f} s, at most {size:,.0f} MiB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))
