"""Without a difference, at most one answer in twenty says better or worse; intervals cover."""

import math
import random
from collections import Counter

import pytest

from normrnn.verdicts.result import verdict_of
from normrnn.verdicts.verdict import Figure, Settings, VariantVerdict
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
        for name, figure in {**one.primary, **one.details}.items():
            shown[name] += 1
            wrong[name] += figure.answer in ("better", "worse")
    assert {"quality", "speed", "gap", "train", "last_validation"} <= shown.keys()
    assert how.get("early_stopping") or "speed_before_drop" in shown
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
@pytest.mark.parametrize("name", ["quality", "speed"])
def test_intervals_cover_a_known_difference(name: str, paired: bool, repetitions: int) -> None:
    """All values 3 % lower: the expected figure follows from a large simulation.

    Speed is measured to a fixed target: one that the runs set depends on their number.
    """
    rng, shift = random.Random(3), math.log(0.97)
    settings = Settings(paired=paired, target=None if name == "quality" else 125.0)

    def figure(rng: random.Random, seeds: int) -> Figure:
        runs = experiment(rng, seeds, paired=paired, shift=shift)
        found = getattr(verdict_of(runs, settings=settings).variants["v1"], name)
        assert found is not None
        return found

    truth, covered = figure(random.Random(1), 1000).estimate, 0
    for _ in range(repetitions):
        interval = figure(rng, 5).interval
        assert interval is not None
        covered += interval[0] <= truth <= interval[1]
    assert covered / repetitions >= 0.93 - 3 * math.sqrt(0.05 * 0.95 / repetitions)
