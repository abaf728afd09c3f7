"""A variant against the baseline: quality, speed, and details, with intervals and answers."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, combinations
from operator import attrgetter, methodcaller
from statistics import NormalDist, geometric_mean, mean, median, variance
from typing import Any, Literal

from normrnn.errors import UsageError
from normrnn.verdicts.rows import PlainRun, Point, crossing

CONFIDENCE = 0.95
SPEED_MARGIN = 0.05
ERROR_RATE = "error rate"
Answer = Literal["better", "worse", "equivalent", "not settled", "one seed"]
Measure = Callable[[PlainRun], float | None]
Interval = tuple[float, float, float]  # an estimate with the bounds of its confidence interval
_MOST_SPLITS = 200_000


@dataclass(frozen=True)
class Figure:
    """One figure of a variant and the baseline, by seed.

    `estimate` and `interval` are differences (variant minus baseline), or ratios (variant divided
    by baseline) if `ratio`. With an infinite value, of a run that diverged or missed the target,
    the estimate compares medians, NaN if one of them is infinite, and there is no interval. There
    is none either where the seeds do not vary at all.
    """

    label: str
    baseline: Mapping[int, float]
    other: Mapping[int, float]
    answer: Answer
    estimate: float
    interval: tuple[float, float] | None = None
    ratio: bool = False
    paired: bool = False
    target: float | None = None  # the validation value to reach, of figures of speed

    @property
    def seeds(self) -> int:
        """Seeds of the variant."""
        return len(self.other)

    @property
    def middle(self) -> tuple[float, float]:
        """Mean of the baseline and of the variant; medians if a value is infinite.

        Ratios are averaged on the log scale, and so are these.
        """
        values = [*self.baseline.values(), *self.other.values()]
        middle = geometric_mean if self.ratio else mean
        middle = median if any(map(math.isinf, values)) else middle
        return middle(self.baseline.values()), middle(self.other.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite number is None."""

        def finite(value: float) -> float | None:
            return value if math.isfinite(value) else None

        names = ("label", "answer", "seeds", "ratio", "paired", "target")
        return {
            **{name: getattr(self, name) for name in names},
            "estimate": finite(self.estimate),
            "interval": None if self.interval is None else list(map(finite, self.interval)),
            "baseline": {str(seed): finite(value) for seed, value in self.baseline.items()},
            "variant": {str(seed): finite(value) for seed, value in self.other.items()},
        }


@dataclass(frozen=True)
class VariantVerdict:
    """A variant against the baseline."""

    primary: dict[str, Figure]  # quality, speed and seconds, as far as there are values
    details: dict[str, Figure]
    """Secondary figures, with 95 % intervals that are not adjusted for several variants."""

    @property
    def quality(self) -> Figure | None:
        """The test value, or the best validation value without a test set."""
        return self.primary.get("quality")

    @property
    def speed(self) -> Figure | None:
        """The updates to a validation value."""
        return self.primary.get("speed")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for a figure without values."""
        absent: dict[str, Any] = dict.fromkeys(("quality", "speed", "seconds"))
        primary = {name: figure.to_dict() for name, figure in self.primary.items()}
        details = {name: figure.to_dict() for name, figure in self.details.items()}
        return {**absent, **primary, "details": details}


@dataclass(frozen=True)
class Settings:
    """What is compared with what, and how."""

    baseline: str | None = None  # name of a variant; None: "none", else the first
    paired: bool = False
    higher_is_better: bool = False
    target: float | None = None
    margin: float = 0.01

    def __post_init__(self) -> None:
        """Raise UsageError unless target and margin are numbers that can be used."""
        if not (isinstance(self.target, int | float | None) and math.isfinite(self.target or 0)):
            raise UsageError(f"target must be a finite number, not {self.target!r}")
        if not 0 <= self.margin < math.inf:
            raise UsageError(f"margin must be at least 0, not {self.margin}")

    @property
    def sign(self) -> int:
        """What values are multiplied with, so that lower is better."""
        return -1 if self.higher_is_better else 1


@dataclass(frozen=True)
class Comparison:
    """The runs of a baseline and of a variant. Lower values are better here."""

    baseline: Sequence[PlainRun]
    other: Sequence[PlainRun]
    settings: Settings
    confidence: float = CONFIDENCE

    @property
    def finished(self) -> list[PlainRun]:
        """The runs that did not diverge."""
        return [run for run in (*self.baseline, *self.other) if not run.diverged]

    def verdict(self, label: str, measure: Measure) -> VariantVerdict:
        """Compare quality, speed, and the details."""
        primary = {"quality": self.difference(label, measure), **self.speed()}
        details = replace(self, confidence=CONFIDENCE).details()
        parts = ({n: f for n, f in some.items() if f is not None} for some in (primary, details))
        return VariantVerdict(*parts)

    def difference(self, label: str, measure: Measure) -> Figure | None:
        """Compare a value of each run, in the unit and direction of the values given."""
        first, second = self._paired_values(
            values_by_seed(self.baseline, measure), values_by_seed(self.other, measure)
        )
        finite = [value for value in first.values() if math.isfinite(value)]
        if not first or not second or not (finite or any(map(math.isfinite, second.values()))):
            return None
        margin = self.settings.margin * abs(mean(finite or [0.0]))
        figure = self._figure(label, first, second, (-margin, margin))
        is_complete = all(run.complete for run in (*self.baseline, *self.other))
        if not is_complete and figure.answer != "one seed":
            figure = replace(figure, answer="not settled")
        if not self.settings.higher_is_better:
            return figure
        interval = None if figure.interval is None else (-figure.interval[1], -figure.interval[0])
        return replace(
            figure,
            estimate=-figure.estimate,
            interval=interval,
            baseline={seed: -value for seed, value in first.items()},
            other={seed: -value for seed, value in second.items()},
        )

    def speed(self) -> dict[str, Figure | None]:
        """Steps and seconds to a validation value that every run reaches, or to the target.

        That value is the worst of the best validations of all runs of both variants, so that it
        favours neither. Diverged runs do not set it, and count as not reaching it.
        """
        reached = [value for run in self.finished if (value := run.best_valid()) is not None]
        if not reached:
            return {}
        given = self.settings.target
        target = max(reached) if given is None else self.settings.sign * given
        return {
            "speed": self.time_to(target, "updates to validation"),
            "seconds": self.time_to(target, "seconds to validation", "seconds"),
        }

    def details(self) -> dict[str, Figure | None]:
        """Compare the secondary figures."""
        found: dict[str, Figure | None] = {}
        if all(run.points("test") for run in self.finished):
            found["best_validation"] = self.difference("best validation", PlainRun.best_valid)
        last = partial(PlainRun.last, split="valid")
        found["last_validation"] = self.difference("last validation", last)
        found["train"] = self.difference("training", partial(PlainRun.last, split="train_eval"))
        found["gap"] = self.difference("validation minus training", PlainRun.gap)
        lower = replace(self, settings=replace(self.settings, higher_is_better=False))
        found["error"] = lower.difference(ERROR_RATE, attrgetter("error_rate"))
        early = [run.before_drop() for run in self.finished]
        if early and all(early):
            target = max(min(p.value for p in points) for points in early)
            label, points = "early updates to validation", PlainRun.before_drop
            found["speed_before_drop"] = self.time_to(target, label, points=points)
        return found

    def time_to(
        self,
        target: float,
        label: str,
        unit: Literal["step", "seconds"] = "step",
        points: Callable[[PlainRun], Sequence[Point]] = methodcaller("points", "valid"),
    ) -> Figure | None:
        """Compare the steps or seconds to a validation value; None if all reach it at once."""

        def time(run: PlainRun) -> float | None:
            reached = crossing(points(run), target)
            return math.inf if reached is None else getattr(reached, unit)

        runs = [
            [run for run in some if points(run) or run.diverged]
            for some in (self.baseline, self.other)
        ]
        if all(points(run)[0].value <= target for run in chain(*runs) if points(run)):
            return None
        first, second = self._paired_values(*(values_by_seed(some, time) for some in runs))
        if not first or not second or min((*first.values(), *second.values())) <= 0:
            return None
        margin = (math.log(1 - SPEED_MARGIN), math.log(1 + SPEED_MARGIN))
        figure = self._figure(label, first, second, margin, ratio=True)
        return replace(figure, target=self.settings.sign * target)

    def _paired_values(
        self, first: dict[int, float], second: dict[int, float]
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Return the values of baseline and variant, if paired those of the seeds in common."""
        if not self.settings.paired:
            return first, second
        common = [seed for seed in first if seed in second]
        return {seed: first[seed] for seed in common}, {seed: second[seed] for seed in common}

    def _figure(
        self,
        label: str,
        baseline: dict[int, float],
        other: dict[int, float],
        margin: tuple[float, float],
        ratio: bool = False,
    ) -> Figure:
        """Return estimate, interval and answer; of ratios they are computed of logarithms."""
        paired = self.settings.paired
        first, second = (
            [math.log(value) if ratio else value for value in values.values()]
            for values in (baseline, other)
        )
        back = (lambda log: math.inf if log > 700 else math.exp(log)) if ratio else float
        make = partial(Figure, label, baseline, other, ratio=ratio, paired=paired)
        is_single = min(len(first), len(second)) < 2
        if any(map(math.isinf, first + second)):
            low, high = median(first), median(second)
            p = min(rank_sum_p(first, second), separation_p(first, second))
            answer: Answer = "one seed" if is_single else "not settled"
            if p <= 1 - self.confidence and high != low:
                answer = "worse" if high > low else "better"
            is_finite = math.isfinite(low) and math.isfinite(high)
            return make(answer=answer, estimate=back(high - low) if is_finite else math.nan)
        if is_single:
            return make(answer="one seed", estimate=back(mean(second) - mean(first)))
        if paired:
            differences = [b - a for a, b in zip(first, second, strict=True)]
            estimate, low, high = paired_interval(differences, self.confidence)
        else:
            estimate, low, high = welch_interval(first, second, self.confidence)
        if high - low <= 1e-9 * max(map(abs, (*first, *second, estimate))):
            # Seeds that do not vary say nothing about the spread: a copied run, or coarse values.
            is_same = margin[0] < estimate < margin[1]
            return make(answer="equivalent" if is_same else "not settled", estimate=back(estimate))
        answer = "better" if high < 0 else "worse" if low > 0 else "not settled"
        if margin[0] < low and high < margin[1]:
            answer = "equivalent"
        return make(answer=answer, estimate=back(estimate), interval=(back(low), back(high)))


def values_by_seed(runs: Sequence[PlainRun], measure: Measure) -> dict[int, float]:
    """The value of each seed, infinite where the run diverged; empty if a run does not have it."""
    values = {run.seed: math.inf if run.diverged else measure(run) for run in runs}
    known = {seed: value for seed, value in values.items() if value is not None}
    return known if len(known) == len(values) else {}


def middle(values: Collection[float]) -> float:
    """The mean, or the median if a value is infinite."""
    return median(values) if any(map(math.isinf, values)) else mean(values)


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
