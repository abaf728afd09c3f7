"""Without a difference, at most one answer in twenty says better or worse; intervals cover."""

import math
import random
from collections import Counter
from typing import Any

import pytest

from normrnn.verdicts.result import verdict_of
from normrnn.verdicts.verdict import Figure, Settings, VariantVerdict
from tests.verdicts.simulated import experiment

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "noisy": {"noise": 0.05},
    "overfitting": {"overfit": 0.02},
    "stopped early": {"overfit": 0.03, "early_stopping": True},
}


def _variants(rng: random.Random, seeds: int, paired: bool, **how: Any) -> list[VariantVerdict]:
    runs = experiment(rng, seeds, paired=paired, **how)
    return list(verdict_of(runs, Settings(paired=paired)).variants.values())


def _limit(repetitions: int) -> float:
    """Five percent and three standard errors of the simulation."""
    return 0.05 + 3 * math.sqrt(0.05 * 0.95 / repetitions)


FULL = [pytest.param(k, s, 3000, marks=pytest.mark.slow) for k in KINDS for s in (3, 5, 10)]


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(
    ("kind", "seeds", "repetitions"), [("plain", 5, 60), ("overfitting", 5, 60), *FULL]
)
def test_no_difference(kind: str, seeds: int, repetitions: int, paired: bool) -> None:
    rng = random.Random(f"{seeds} {paired} {KINDS[kind]}")
    wrong, shown = Counter(), Counter()
    for _ in range(repetitions):
        (one,) = _variants(rng, seeds, paired, **KINDS[kind])
        for name, figure in {**one.primary, **one.details}.items():
            shown[name] += 1
            wrong[name] += figure.answer in ("better", "worse")
    assert {"quality", "speed", "gap", "train", "last_validation"} <= shown.keys()
    assert kind == "stopped early" or "speed_before_drop" in shown
    for name, count in shown.items():
        assert wrong[name] / count <= _limit(repetitions), name


@pytest.mark.parametrize("repetitions", [40, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("paired", [True, False])
def test_no_difference_in_four_variants(paired: bool, repetitions: int) -> None:
    rng, wrong = random.Random(7), Counter()
    for _ in range(repetitions):
        found = _variants(rng, 5, paired, variants=4)
        for name in ("quality", "speed"):
            wrong[name] += any(v.primary[name].answer in ("better", "worse") for v in found)
    assert max(wrong.values()) / repetitions <= _limit(repetitions)


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
        found = getattr(verdict_of(runs, settings).variants["v1"], name)
        assert found is not None
        return found

    truth, covered = figure(random.Random(1), 1000).estimate, 0
    for _ in range(repetitions):
        interval = figure(rng, 5).interval
        assert interval is not None
        covered += interval[0] <= truth <= interval[1]
    assert covered / repetitions >= 0.93 - 3 * math.sqrt(0.05 * 0.95 / repetitions)
