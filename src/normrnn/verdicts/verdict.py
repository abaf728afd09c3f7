"""A variant against the baseline: quality, speed, and details, with intervals and answers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, median
from typing import Any, Literal

from normrnn.errors import UsageError
from normrnn.verdicts.intervals import (
    Interval,
    paired_interval,
    rank_sum_p,
    separation_p,
    welch_interval,
)
from normrnn.verdicts.rows import PlainRun, Point, crossing

CONFIDENCE = 0.95
SPEED_MARGIN = 0.05
Answer = Literal["better", "worse", "equivalent", "not settled", "one seed"]
Measure = Callable[[PlainRun], float | None]


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
    target: float | None = None
    """The validation value to reach, of figures of speed."""

    @property
    def seeds(self) -> int:
        """Seeds of the variant."""
        return len(self.other)

    @property
    def middle(self) -> tuple[float, float]:
        """Mean of the baseline and of the variant; medians if a value is infinite.

        Ratios are averaged on the log scale, and so are these.
        """
        low, high = list(self.baseline.values()), list(self.other.values())
        if any(map(math.isinf, low + high)):
            return median(low), median(high)
        if self.ratio:
            return math.exp(mean(map(math.log, low))), math.exp(mean(map(math.log, high)))
        return mean(low), mean(high)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite number is None."""
        finite = _finite_or_none
        return {
            "label": self.label,
            "answer": self.answer,
            "estimate": finite(self.estimate),
            "interval": None if self.interval is None else list(map(finite, self.interval)),
            "seeds": self.seeds,
            "ratio": self.ratio,
            "paired": self.paired,
            "target": self.target,
            "baseline": {str(seed): finite(value) for seed, value in self.baseline.items()},
            "variant": {str(seed): finite(value) for seed, value in self.other.items()},
        }


@dataclass(frozen=True)
class VariantVerdict:
    """A variant against the baseline."""

    quality: Figure | None
    speed: Figure | None
    seconds: Figure | None = None
    details: dict[str, Figure] = field(default_factory=dict)
    """Secondary figures, with 95 % intervals that are not adjusted for several variants."""

    @property
    def primary(self) -> dict[str, Figure]:
        """Quality, speed and seconds, as far as there are values."""
        every = {"quality": self.quality, "speed": self.speed, "seconds": self.seconds}
        return {name: figure for name, figure in every.items() if figure is not None}

    @property
    def all(self) -> list[Figure]:
        """Primary and secondary figures."""
        return [*self.primary.values(), *self.details.values()]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for a figure without values."""
        absent: dict[str, Any] = dict.fromkeys(("quality", "speed", "seconds"))
        found = {name: figure.to_dict() for name, figure in self.primary.items()}
        details = {name: figure.to_dict() for name, figure in self.details.items()}
        return {**absent, **found, "details": details}


@dataclass(frozen=True)
class Settings:
    """What is compared with what, and how."""

    baseline: str | None = None
    """Name of a variant; None: "none", else the first."""
    paired: bool = False
    higher_is_better: bool = False
    target: float | None = None
    margin: float = 0.01
    comparisons: int = 1
    """Variants that are compared with the baseline: intervals are simultaneous over them."""

    def check(self) -> None:
        """Raise UsageError unless target and margin are numbers that can be used."""
        check_target(self.target)
        if not 0 <= self.margin < math.inf:
            raise UsageError(f"margin must be at least 0, not {self.margin}")

    @property
    def confidence(self) -> float:
        """Of each primary interval, by Bonferroni."""
        return 1 - (1 - CONFIDENCE) / self.comparisons

    @property
    def sign(self) -> int:
        """What values are multiplied with, so that lower is better."""
        return -1 if self.higher_is_better else 1


def check_target(target: float | None) -> None:
    """Raise UsageError unless the target, if there is one, is a finite number."""
    if target is not None and not (isinstance(target, int | float) and math.isfinite(target)):
        raise UsageError(f"target must be a finite number, not {target!r}")


@dataclass(frozen=True)
class Comparison:
    """The runs of a baseline and of a variant. Lower values are better here."""

    baseline: Sequence[PlainRun]
    other: Sequence[PlainRun]
    settings: Settings

    @property
    def finished(self) -> list[PlainRun]:
        """The runs that did not diverge."""
        return [run for run in (*self.baseline, *self.other) if not run.diverged]

    def verdict(self, label: str, measure: Measure) -> VariantVerdict:
        """Compare quality, speed, and the details."""
        details = replace(self, settings=replace(self.settings, comparisons=1)).details()
        return VariantVerdict(self.difference(label, measure), *self.speed(), details)

    def difference(self, label: str, measure: Measure) -> Figure | None:
        """Compare a value of each run, in the unit and direction of the values given."""
        first, second = self._values(measure)
        known = [value for value in first.values() if math.isfinite(value)]
        if not first or not second or not (known or any(map(math.isfinite, second.values()))):
            return None
        margin = self.settings.margin * abs(mean(known or [0.0]))
        found = _figure(label, first, second, self.settings, (-margin, margin))
        if not self.settings.higher_is_better:
            return found
        interval = None if found.interval is None else (-found.interval[1], -found.interval[0])
        return replace(
            found,
            estimate=-found.estimate,
            interval=interval,
            baseline={seed: -value for seed, value in first.items()},
            other={seed: -value for seed, value in second.items()},
        )

    def speed(self) -> tuple[Figure | None, Figure | None]:
        """Steps and seconds to a validation value that every run reaches, or to the target.

        That value is the worst of the best validations of all runs of both variants, so that it
        favours neither. Diverged runs do not set it, and count as not reaching it.
        """
        reached = [value for run in self.finished if (value := run.best_valid()) is not None]
        if not reached:
            return None, None
        given = self.settings.target
        target = max(reached) if given is None else self.settings.sign * given
        seconds = self.time_to(target, "seconds to validation", "seconds")
        return self.time_to(target, "updates to validation"), seconds

    def details(self) -> dict[str, Figure]:
        """Compare the secondary figures, as far as there are values."""
        found: dict[str, Figure | None] = {}
        if all(run.points("test") for run in self.finished):
            found["best_validation"] = self.difference("best validation", PlainRun.best_valid)
        last = partial(PlainRun.last, split="valid")
        found["last_validation"] = self.difference("last validation", last)
        found["train"] = self.difference("training", partial(PlainRun.last, split="train_eval"))
        found["gap"] = self.difference("validation minus training", PlainRun.gap)
        early = [run.before_drop() for run in self.finished]
        if early and all(early):
            target = max(min(p.value for p in points) for points in early)
            label, points = "early updates to validation", PlainRun.before_drop
            found["speed_before_drop"] = self.time_to(target, label, points=points)
        return {name: figure for name, figure in found.items() if figure is not None}

    def time_to(
        self,
        target: float,
        label: str,
        unit: Literal["step", "seconds"] = "step",
        points: Callable[[PlainRun], Sequence[Point]] = PlainRun.validations,
    ) -> Figure | None:
        """Compare the steps or seconds to a validation value; None if all reach it at once."""
        runs = [run for run in (*self.baseline, *self.other) if run.points("valid") or run.diverged]
        met = {id(run): crossing(points(run), target) for run in runs}
        if all(met[id(run)] == points(run)[0] for run in runs if points(run)):
            return None  # all were there at their first validation
        times = {k: math.inf if p is None else getattr(p, unit) for k, p in met.items()}
        first, second = self._values(lambda run: times[id(run)], among=met)
        if not first or not second or min((*first.values(), *second.values())) <= 0:
            return None
        margin = (math.log(1 - SPEED_MARGIN), math.log(1 + SPEED_MARGIN))
        figure = _figure(label, first, second, self.settings, margin, ratio=True)
        return replace(figure, target=self.settings.sign * target)

    def _values(
        self, measure: Measure, among: Mapping[int, Any] | None = None
    ) -> tuple[dict[int, float], dict[int, float]]:
        """The values of baseline and variant by seed; of the seeds in common if they are paired."""
        first, second = (
            values_by_seed([run for run in runs if among is None or id(run) in among], measure)
            for runs in (self.baseline, self.other)
        )
        if self.settings.paired:
            common = [seed for seed in first if seed in second]
            first, second = ({seed: values[seed] for seed in common} for values in (first, second))
        return first, second


def values_by_seed(runs: Sequence[PlainRun], measure: Measure) -> dict[int, float]:
    """The value of each seed, infinite where the run diverged; empty if a run does not have it."""
    values = {run.seed: math.inf if run.diverged else measure(run) for run in runs}
    known = {seed: value for seed, value in values.items() if value is not None}
    return known if len(known) == len(values) else {}


def _figure(
    label: str,
    baseline: dict[int, float],
    other: dict[int, float],
    settings: Settings,
    margin: tuple[float, float],
    ratio: bool = False,
) -> Figure:
    first, second = (
        {seed: math.log(value) if ratio else value for seed, value in values.items()}
        for values in (baseline, other)
    )
    values = [*first.values(), *second.values()]
    back = _exp if ratio else float
    make = partial(Figure, label, baseline, other, ratio=ratio, paired=settings.paired)
    alone = min(len(first), len(second)) < 2
    if any(map(math.isinf, values)):
        low, high = median(first.values()), median(second.values())
        groups = list(first.values()), list(second.values())
        p = min(rank_sum_p(*groups), separation_p(*groups))
        answer: Answer = "one seed" if alone else "not settled"
        if p <= 1 - settings.confidence and high != low:
            answer = "worse" if high > low else "better"
        known = math.isfinite(low) and math.isfinite(high)
        return make(answer=answer, estimate=back(high - low) if known else math.nan)
    if alone:
        estimate = mean(second.values()) - mean(first.values())
        return make(answer="one seed", estimate=back(estimate))
    if settings.paired:
        differences = [second[seed] - value for seed, value in first.items()]
        found = paired_interval(differences, settings.confidence)
    else:
        groups = list(first.values()), list(second.values())
        found = welch_interval(*groups, settings.confidence)
    if found.high - found.low <= 1e-9 * max(map(abs, (*values, found.estimate))):
        # Seeds that do not vary say nothing about the spread: a copied run, or coarse values.
        same = margin[0] < found.estimate < margin[1]
        answer = "equivalent" if same else "not settled"
        return make(answer=answer, estimate=back(found.estimate))
    interval = back(found.low), back(found.high)
    return make(answer=_answer(found, margin), estimate=back(found.estimate), interval=interval)


def _answer(interval: Interval, margin: tuple[float, float]) -> Answer:
    if margin[0] < interval.low and interval.high < margin[1]:
        return "equivalent"
    if interval.high < 0:
        return "better"
    return "worse" if interval.low > 0 else "not settled"


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
