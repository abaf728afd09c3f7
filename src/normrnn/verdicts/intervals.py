"""Confidence intervals of differences between two groups of values."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from statistics import NormalDist, mean, variance

Interval = tuple[float, float, float]  # an estimate with the bounds of its confidence interval
_MOST_SPLITS = 200_000


def paired_interval(differences: Sequence[float], confidence: float) -> Interval:
    """Student's t interval of the mean of paired differences; at least two are needed."""
    n, middle = len(differences), mean(differences)
    half = t_quantile(confidence, n - 1) * math.sqrt(variance(differences) / n)
    return middle, middle - half, middle + half


def welch_interval(
    baseline: Sequence[float], other: Sequence[float], confidence: float
) -> Interval:
    """Welch's t interval of mean(other) - mean(baseline); each group has at least two values."""
    parts = [variance(values) / len(values) for values in (baseline, other)]
    total, middle = sum(parts), mean(other) - mean(baseline)
    sizes = len(baseline) - 1, len(other) - 1
    squares = sum(part * part / size for part, size in zip(parts, sizes, strict=True))
    degrees = total * total / squares if squares else sum(sizes)
    half = t_quantile(confidence, degrees) * math.sqrt(total) if total else 0.0
    return middle, middle - half, middle + half


def rank_sum_p(baseline: Sequence[float], other: Sequence[float]) -> float:
    """Two-sided p value of the Wilcoxon rank-sum test; exact for small groups, with ties.

    Infinite values are allowed: they are ranked last.
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
    n, m = len(baseline), len(other)
    if sorted((sum(map(math.isinf, baseline)) / n, sum(map(math.isinf, other)) / m)) != [0, 1]:
        return 1.0
    return 2 * (n / (n + m)) ** n * (m / (n + m)) ** m


@cache
def t_quantile(confidence: float, degrees: float) -> float:
    """The t with P(|T| < t) = confidence, for any positive degrees of freedom."""
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(degrees)
    for _ in range(60):
        middle = (low + high) / 2
        tail = _tail(math.cos(middle) ** 2, degrees)
        low, high = (middle, high) if tail > 1 - confidence else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def _tail(x: float, degrees: float) -> float:
    """P(|T| > t) for x = degrees / (degrees + t²): I_x(degrees/2, 1/2), the incomplete beta
    function, by its power series."""
    a = degrees / 2
    term = total = 1.0
    n = 0
    while term > 1e-17 * total:
        term *= x * (a + 0.5 + n) / (a + 1 + n)
        total += term
        n += 1
    logs = math.lgamma(a + 0.5) - math.lgamma(a + 1) - math.lgamma(0.5) + a * math.log(x)
    return math.exp(logs) * math.sqrt(1 - x) * total
