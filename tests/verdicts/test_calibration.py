"""Without a difference, at most one answer in twenty says better or worse; intervals cover."""

import math
import random
from collections import Counter

import pytest

from normrnn.verdicts.result import verdict_of
from normrnn.verdicts.verdict import Settings, VariantVerdict
from tests.verdicts.simulated import experiment

KINDS = {
    "plain": {},
    "noisy": {"noise": 0.05},
    "overfitting": {"overfit": 0.02},
    "stopped early": {"overfit": 0.03, "early_stopping": True},
}


def _variants(rng: random.Random, seeds: int, paired: bool, **how: object) -> list[VariantVerdict]:
    runs = experiment(rng, seeds, paired=paired, **how)  # type: ignore[arg-type]
    return list(verdict_of(runs, settings=Settings(paired=paired)).variants.values())


def _false_answers(seeds: int, paired: bool, repetitions: int, **how: object) -> dict[str, float]:
    rng = random.Random(f"{seeds} {paired} {how}")
    wrong, shown = Counter(), Counter()
    for _ in range(repetitions):
        (one,) = _variants(rng, seeds, paired, **how)
        primary = {"quality": one.quality, "speed": one.speed, "seconds": one.seconds}
        for name, figure in {**primary, **one.details}.items():
            if figure is not None:
                shown[name] += 1
                wrong[name] += figure.answer in ("better", "worse")
    assert {"quality", "speed", "gap", "area", "train", "last_validation"} <= shown.keys()
    return {name: wrong[name] / count for name, count in shown.items()}


def _limit(repetitions: int) -> float:
    """Five percent and three standard errors of the simulation."""
    return 0.05 + 3 * math.sqrt(0.05 * 0.95 / repetitions)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("kind", ["plain", "overfitting"])
def test_no_difference(kind: str, paired: bool) -> None:
    for name, rate in _false_answers(5, paired, 60, **KINDS[kind]).items():
        assert rate <= _limit(60), (name, rate)


@pytest.mark.slow
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("kind", KINDS)
def test_no_difference_in_full(kind: str, seeds: int, paired: bool) -> None:
    for name, rate in _false_answers(seeds, paired, 3000, **KINDS[kind]).items():
        assert rate <= _limit(3000), (name, rate)


def _family(paired: bool, repetitions: int) -> tuple[float, float]:
    rng = random.Random(7)
    quality = speed = 0
    for _ in range(repetitions):
        found = _variants(rng, 5, paired, variants=4)
        quality += any(v.quality and v.quality.answer in ("better", "worse") for v in found)
        speed += any(v.speed and v.speed.answer in ("better", "worse") for v in found)
    return quality / repetitions, speed / repetitions


@pytest.mark.parametrize("repetitions", [40, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("paired", [True, False])
def test_no_difference_in_four_variants(paired: bool, repetitions: int) -> None:
    assert max(_family(paired, repetitions)) <= _limit(repetitions)


@pytest.mark.parametrize("repetitions", [60, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("paired", [True, False])
def test_intervals_cover_a_known_difference(paired: bool, repetitions: int) -> None:
    """All values 3 % lower: the expected test difference follows from a large simulation."""
    rng, shift = random.Random(3), math.log(0.97)
    many = _variants(random.Random(1), 1000, paired, shift=shift)[0].quality
    assert many is not None
    truth, covered = many.estimate, 0
    for _ in range(repetitions):
        figure = _variants(rng, 5, paired, shift=shift)[0].quality
        assert figure is not None
        assert figure.interval is not None
        covered += figure.interval[0] <= truth <= figure.interval[1]
    assert covered / repetitions >= 0.93 - 3 * math.sqrt(0.05 * 0.95 / repetitions)
