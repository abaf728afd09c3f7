"""Two arms over the same seeds: mean difference, t interval, agreement, seeds needed. Plain
numbers, no runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import mean, stdev
from typing import Any, Literal

CONFIDENCE = 0.95
POWER = 0.8
MOST_SEEDS = 1000
Answer = Literal["better", "worse", "no difference seen", "one seed", "some diverged"]


def t_central(t: float, degrees: int) -> float:
    """P(|T| < t) of Student's T with whole degrees of freedom: finite sums (Abramowitz and Stegun,
    26.7.3 and 26.7.4).

    >>> round(t_central(1.0, 1), 12)
    0.5
    """
    angle = math.atan2(t, math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """The t with P(T < t) = probability, for probabilities from 0.5 on.

    >>> round(t_quantile(0.975, 4), 3)
    2.776
    """
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ValueError(f"no quantile {probability} with {degrees} degrees of freedom")
    wanted, low, high = 2 * probability - 1, 0.0, math.pi / 2
    for _ in range(60):  # halving the angle whose tangent is t / √degrees
        middle = (low + high) / 2
        below = t_central(math.tan(middle) * math.sqrt(degrees), degrees) < wanted
        low, high = (middle, high) if below else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def mean_interval(values: Sequence[float], step: float = 0.0) -> tuple[float, float] | None:
    """The 95 % t interval of the mean; None of one value. Values that were rounded to a `step` have
    a twelfth of its square more variance."""
    n = len(values)
    if n < 2:
        return None
    deviation = math.hypot(stdev(values), step / math.sqrt(12))
    half = t_quantile((1 + CONFIDENCE) / 2, n - 1) * deviation / math.sqrt(n)
    return mean(values) - half, mean(values) + half


@dataclass(frozen=True)
class Difference:
    """A figure of two arms, lower is better, once per seed that both have.

    A difference is other − baseline, or with `relative` that as a share of the baseline's: then
    all figures are above 0, and it is their ratios that are averaged, as logarithms, so that twice
    as many in one seed and half as many in another are no difference.
    """

    seeds: tuple[int, ...]
    baseline: tuple[float, ...]
    other: tuple[float, ...]
    relative: bool = False
    resolution: float = 0.0
    """The step between two looks, where a difference is of times that were looked at now and then
    only, as a share of both times in quadratic mean. Two of them rounded add a sixth of its square
    to the variance."""
    at_least: bool = False
    """Whether there may be more to it: the other was there when it was first looked at."""
    diverged: tuple[tuple[float, float], ...] = ()
    """Both arms in seeds where a run diverged, infinite there. They are in no mean, but they count
    as lost or won, and no arm is called better or worse for the seeds that are left."""
    spoilt: bool = False
    """Whether a run of either arm diverged: one in the mean, as far as it got, or one in none."""

    @cached_property
    def differences(self) -> tuple[float, ...]:
        """One per seed."""
        pairs = zip(self.baseline, self.other, strict=True)
        return tuple(b / a - 1 if self.relative else b - a for a, b in pairs)

    @cached_property
    def _averaged(self) -> tuple[float, ...]:
        """The differences as they are averaged: logarithms of ratios, where they are shares."""
        if not self.relative:
            return self.differences
        pairs = zip(self.baseline, self.other, strict=True)
        return tuple(math.log(b / a) for a, b in pairs)

    def _shown(self, averaged: float) -> float:
        return math.expm1(min(averaged, 700.0)) if self.relative else averaged

    @cached_property
    def mean(self) -> float:
        """Of the differences."""
        return self._shown(mean(self._averaged))

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """95 %, by Student's t over the paired differences; None of one seed."""
        n = len(self.seeds)
        if n < 2:
            return None
        half = t_quantile((1 + CONFIDENCE) / 2, n - 1) * self._deviation / math.sqrt(n)
        middle = mean(self._averaged)
        return self._shown(middle - half), self._shown(middle + half)

    @cached_property
    def _deviation(self) -> float:
        """Standard deviation of what is averaged, what was rounded included: two seeds that are
        both one look apart would be certain otherwise."""
        return math.hypot(stdev(self._averaged), self.resolution / math.sqrt(6))

    @property
    def answer(self) -> Answer:
        """Better or worse only if the interval leaves no difference out."""
        if self.diverged or self.spoilt:
            return "some diverged"
        if self.interval is None:
            return "one seed"
        low, high = self.interval
        return "better" if high < 0 else "worse" if low > 0 else "no difference seen"

    @property
    def compared(self) -> int:
        """Seeds, with those of which a run diverged."""
        return len(self.seeds) + len(self.diverged)

    @property
    def agreeing(self) -> int:
        """Seeds whose difference has the sign of the mean."""
        lost = [(b > a) - (b < a) for a, b in self.diverged]
        every = (*self.differences, *lost)
        return sum(d * self.mean > 0 or d == self.mean == 0 for d in every)

    @property
    def probability_of_improvement(self) -> float:
        """Share of all pairings of a run with a baseline run, whatever their seeds, that it wins;
        a tie counts half."""
        baseline = (*self.baseline, *(a for a, _ in self.diverged))
        other = (*self.other, *(b for _, b in self.diverged))
        return mean((b < a) + (b == a) / 2 for a in baseline for b in other)

    @property
    def seeds_needed(self) -> int | None:
        """So many, that a difference of this mean and spread is seen in four experiments of five;
        MOST_SEEDS + 1 stands for more, None of one seed or no difference."""
        if len(self.seeds) < 2 or not self.mean:
            return None
        spread = self._deviation / abs(mean(self._averaged))
        n = max(2, math.ceil((2.8 * spread) ** 2))  # the quantiles' sum is 1.96 + 0.84 or more
        while n <= MOST_SEEDS:
            both = t_quantile((1 + CONFIDENCE) / 2, n - 1) + t_quantile(POWER, n - 1)
            if both * spread <= math.sqrt(n):
                return n
            n += 1
        return MOST_SEEDS + 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = ("seeds", "baseline", "other", "relative", "differences", "mean", "interval")
        names += ("answer", "agreeing", "compared", "probability_of_improvement", "seeds_needed")
        names += ("at_least",)
        found = {name: getattr(self, name) for name in names}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}
