"""How long `normrnn compare arrays` takes on a file of one's own, and how well it learns.

    python -m benchmarks.arrays [--noise 0.3]

1,000 ragged sequences of 20 to 60 steps with 12 features; three classes that differ in the
frequency of waves with random phases and scales; two norms, three seeds, else the defaults.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

COUNT, FEATURES, CLASSES = 1000, 12, 3


def write_problem(path: Path, noise: float) -> None:
    """Write x, lengths and y."""
    rng = np.random.default_rng(7)
    lengths, y = rng.integers(20, 61, COUNT), rng.integers(0, CLASSES, COUNT)
    pieces = []
    for length, label in zip(lengths, y, strict=True):
        waves = np.sin(
            np.arange(length)[:, None] * (0.25 + 0.22 * label) + rng.uniform(0, 2 * np.pi, FEATURES)
        )
        pieces.append(waves + noise * rng.normal(size=waves.shape))
    scales = rng.lognormal(size=FEATURES)
    np.savez(path, x=np.concatenate(pieces) * scales, lengths=lengths, y=y)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--noise", type=float, default=0.3, help="beside waves of size 1")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_problem(folder / "mine.npz", arguments.noise)
        command = ["compare", "arrays", "--data", folder / "mine.npz", "--seeds", "3"]
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "normrnn", *map(str, command), "--out", folder / "out"],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        print(f"{time.perf_counter() - start:.1f} s")
        for run in sorted((folder / "out").glob("*/metrics.jsonl")):
            rows = [json.loads(line) for line in run.read_text().splitlines()]
            errors = [r["error"] for r in rows if r["split"] == "test" and "error" in r]
            print(f"{run.parent.name:<12} test accuracy {1 - errors[0]:.3f}")


if __name__ == "__main__":
    main()
