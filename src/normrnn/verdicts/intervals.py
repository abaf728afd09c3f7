"""Confidence intervals of differences between two groups of values."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from statistics import NormalDist, mean, variance
from typing import NamedTuple

_MOST_SPLITS = 200_000


class Interval(NamedTuple):
    """An estimate with the bounds of its confidence interval."""

    estimate: float
    low: float
    high: float


def paired_interval(differences: Sequence[float], confidence: float) -> Interval:
    """Student's t interval of the mean of paired differences; at least two are needed.

    >>> paired_interval([1.0, 2.0, 3.0], 0.95).high.__round__(3)
    4.484
    """
    n = len(differences)
    half = t_quantile(confidence, n - 1) * math.sqrt(variance(differences) / n)
    return _around(mean(differences), half)


def welch_interval(
    baseline: Sequence[float], other: Sequence[float], confidence: float
) -> Interval:
    """Welch's t interval of mean(other) - mean(baseline); each group has at least two values.

    >>> round(welch_interval([1.0, 2.0, 3.0], [2.0, 3.0, 7.0], 0.95).low, 3)
    -3.741
    """
    parts = [variance(values) / len(values) for values in (baseline, other)]
    total = sum(parts)
    sizes = len(baseline) - 1, len(other) - 1
    squares = sum(part * part / size for part, size in zip(parts, sizes, strict=True))
    degrees = total * total / squares if squares else sum(sizes)
    half = t_quantile(confidence, degrees) * math.sqrt(total) if total else 0.0
    return _around(mean(other) - mean(baseline), half)


def rank_sum_p(baseline: Sequence[float], other: Sequence[float]) -> float:
    """Two-sided p value of the Wilcoxon rank-sum test; exact for small groups, with ties.

    Infinite values are allowed: they are ranked last.

    >>> round(rank_sum_p([1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, math.inf]), 4)
    0.0079
    """
    values = [*baseline, *other]
    ranks = [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]
    n, m = len(values), len(other)
    expected = m * (n + 1) / 2
    away = abs(sum(ranks[len(baseline) :]) - expected)
    if math.comb(n, m) <= _MOST_SPLITS:
        sums = [sum(some) for some in combinations(ranks, m)]
        return sum(abs(s - expected) >= away - 1e-9 for s in sums) / len(sums)
    spread = math.sqrt(m * (n - m) / n * variance(ranks))
    return 2 * (1 - NormalDist().cdf(max(away - 0.5, 0) / spread)) if spread else 1.0


def separation_p(baseline: Sequence[float], other: Sequence[float]) -> float:
    """Bound on the p value of "all runs of one group failed, none of the other"; else 1.

    Failed runs are infinite. If both groups fail with the same probability q, that has probability
    q^n (1 - q)^m or q^m (1 - q)^n, at its largest for q = n / (n + m) and m / (n + m).

    >>> separation_p([1.0, 2.0, 3.0], [math.inf] * 3)
    0.03125
    """
    failed = [[math.isinf(value) for value in values] for values in (baseline, other)]
    if {all(some) for some in failed} != {True, False} or {any(some) for some in failed} == {True}:
        return 1.0
    n, m = map(len, failed)
    return 2 * (n / (n + m)) ** n * (m / (n + m)) ** m


@cache
def t_quantile(confidence: float, degrees: float) -> float:
    """The t with P(|T| < t) = confidence, for any positive degrees of freedom.

    >>> round(t_quantile(0.95, 4), 3), round(t_quantile(0.95, 2.5), 3)
    (2.776, 3.575)
    """
    if not 0 < confidence < 1 or not degrees > 0:
        raise ValueError(f"no t quantile for confidence {confidence}, {degrees} degrees of freedom")
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(degrees)
    for _ in range(60):
        middle = (low + high) / 2
        x = math.cos(middle) ** 2
        low, high = (middle, high) if _tail(x, degrees) > 1 - confidence else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def _tail(x: float, degrees: float) -> float:
    """P(|T| > t) = I_x(degrees/2, 1/2), x = degrees / (degrees + t²), the incomplete beta."""
    a, b = degrees / 2, 0.5
    if x > (a + 1) / (a + b + 2):  # where the continued fraction converges slowly
        return 1 - _beta_fraction(1 - x, b, a)
    return _beta_fraction(x, a, b)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function by its continued fraction (Lentz's method)."""
    if x <= 0:
        return 0.0
    logs = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(logs + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        before = fraction
        for term in (even, odd):
            d, c = 1 / (1 + term * d), 1 + term / c
            fraction *= c * d
        if abs(fraction - before) < 1e-15 * abs(fraction):
            break
    return front * fraction


def _around(middle: float, half: float) -> Interval:
    return Interval(middle, middle - half, middle + half)
