"""Validation and test curves of made-up runs: noise of runs and seeds, a learning-rate drop."""

import math
import random
from typing import Any

from normrnn.verdicts.rows import PlainRun, Point


def curve(
    rng: random.Random,
    level: float,
    *,
    noise: float = 0.01,
    overfit: float = 0.0,
    early_stopping: bool = False,
    validations: int = 10,
) -> dict[str, list[Point]]:
    """Losses that fall, drop with the learning rate after the seventh validation, and may rise."""
    level += rng.gauss(0, 0.02)
    pace = math.exp(rng.gauss(0, 0.05))
    valid: list[Point] = []
    train: list[Point] = []
    worse = 0
    for number in range(1, validations + 1):
        loss = 4.7 + level + 1.2 * math.exp(-number * pace / 2.5) + overfit * max(0, number - 6)
        dropped = max(0, number - 7)
        loss -= 0.12 * (1 - math.exp(-1.5 * dropped))
        loss += rng.gauss(0, noise)
        rate = 0.5 if dropped else 1.0
        seconds = 10 * number * math.exp(rng.gauss(0, 0.02))
        valid.append(Point(100 * number, math.exp(loss), seconds, rate))
        fitted = math.exp(loss - 0.4 - 0.03 * number + rng.gauss(0, noise))
        train.append(Point(100 * number, fitted, seconds, rate))
        worse = 0 if valid[-1].value <= min(p.value for p in valid) else worse + 1
        if early_stopping and worse == 2:
            break
    best = min(point.value for point in valid)
    test = [Point(valid[-1].step, best * math.exp(rng.gauss(-0.03, 0.005)))]
    return {"valid": valid, "test": test, "train_eval": train}


def experiment(
    rng: random.Random,
    seeds: int,
    variants: int = 1,
    *,
    paired: bool,
    shift: float = 0.0,
    **options: Any,
) -> list[PlainRun]:
    """Runs of a baseline and of variants with shifted losses; paired runs share their level."""
    runs = []
    for seed in range(seeds):
        shared = rng.gauss(0, 0.02)
        for variant in range(variants + 1):
            level = shared if paired else rng.gauss(0, 0.02)
            splits = curve(rng, level + (shift if variant else 0.0), **options)
            runs.append(PlainRun(f"v{variant}" if variant else "none", seed, splits))
    return runs
