"""Each variant against the baseline: quality, speed, and details, with intervals and answers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean
from typing import Any, Literal

from normrnn.errors import UsageError
from normrnn.verdicts import figures
from normrnn.verdicts.intervals import (
    Interval,
    paired_interval,
    rank_sum_p,
    separation_p,
    welch_interval,
)
from normrnn.verdicts.rows import BASELINE, PlainRun, Point

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
        groups = [list(self.baseline.values()), list(self.other.values())]
        if any(math.isinf(value) for values in groups for value in values):
            low, high = map(figures.median, groups)
        elif self.ratio:
            low, high = (math.exp(mean(map(math.log, values))) for values in groups)
        else:
            low, high = map(mean, groups)
        return low, high

    @property
    def half_width(self) -> float | None:
        """Half the width of the interval; for ratios the factor from the estimate to its ends."""
        if self.interval is None:
            return None
        low, high = self.interval
        return math.sqrt(high / low) if self.ratio else (high - low) / 2

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite number is None."""
        finite = _finite_or_none
        return {
            "label": self.label,
            "answer": self.answer,
            "estimate": finite(self.estimate),
            "interval": None if self.interval is None else list(map(finite, self.interval)),
            "half_width": self.half_width,
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for a figure without values."""
        absent: dict[str, Any] = dict.fromkeys(("quality", "speed", "seconds"))
        found = {name: figure.to_dict() for name, figure in self.primary.items()}
        details = {name: figure.to_dict() for name, figure in self.details.items()}
        return {**absent, **found, "details": details}


@dataclass(frozen=True)
class Settings:
    """How figures are computed."""

    paired: bool = False
    higher_is_better: bool = False
    target: float | None = None
    margin: float = 0.01
    comparisons: int = 1
    """Variants that are compared with the baseline: intervals are simultaneous over them."""

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


def compare_runs(
    runs: Sequence[PlainRun], baseline: str | None, settings: Settings
) -> tuple[str, dict[str, VariantVerdict], list[tuple[str, float]], list[str]]:
    """Compare every variant with the baseline, in the order of the runs.

    Returns the baseline's name, the verdicts, all variants with the mean of their quality, the best
    first (without those that diverged), and notes on runs that lack values which others have.
    """
    check_target(settings.target)
    if not 0 <= settings.margin < math.inf:
        raise UsageError(f"margin must be at least 0, not {settings.margin}")
    variants: dict[str, list[PlainRun]] = {}
    for run in runs:
        same = variants.setdefault(run.variant, [])
        if any(other.seed == run.seed for other in same):
            raise UsageError(f"two runs of variant {run.variant!r} have seed {run.seed}")
        same.append(_oriented(run, settings.sign))
    if not any(run.points(split) for run in runs for split in ("valid", "test")):
        splits = sorted({split for run in runs for split in run.splits})
        if splits:
            raise UsageError(f"no valid or test values: the splits are {', '.join(splits)}")
    first = BASELINE if BASELINE in variants else next(iter(variants))
    name = first if baseline is None else str(baseline)
    if name not in variants:
        raise UsageError(f"no variant {name!r}: there are {', '.join(map(repr, variants))}")
    others = [other for other in variants if other != name]
    settings = replace(settings, comparisons=max(1, len(others)))
    quality = _quality_measure(runs)
    means = {
        variant: settings.sign * figures.median(list(values.values()))
        if any(map(math.isinf, values.values()))
        else settings.sign * mean(values.values())
        for variant, some in variants.items()
        if (values := _values(some, quality[1]))
    }
    order = sorted(means.items(), key=lambda item: settings.sign * item[1])
    return (
        name,
        {other: _compared(variants[name], variants[other], settings, quality) for other in others},
        [(variant, value) for variant, value in order if math.isfinite(value)],
        _notes(runs),
    )


def _quality_measure(runs: Sequence[PlainRun]) -> tuple[str, Measure]:
    """The test value, or the best validation where a run has no test value."""
    if all(run.points("test") for run in runs if not run.diverged):
        return "test", figures.selected_test_value
    return "best validation", figures.best_valid


def _notes(runs: Sequence[PlainRun]) -> list[str]:
    notes = []
    for split, what in (("valid", "not compared"), ("test", "validation is compared instead")):
        without = [run for run in runs if not run.points(split) and not run.diverged]
        if without and len(without) < len(runs):
            names = ", ".join(f"{run.variant} seed {run.seed}" for run in without[:3])
            more = ", …" if len(without) > 3 else ""
            notes.append(f"no {split} values: {names}{more}; {what}")
    return notes


def _oriented(run: PlainRun, sign: int) -> PlainRun:
    splits = {
        split: [point._replace(value=sign * point.value) for point in points]
        for split, points in run.splits.items()
    }
    return replace(run, splits=splits)


def _compared(
    baseline: list[PlainRun],
    other: list[PlainRun],
    settings: Settings,
    quality: tuple[str, Measure],
) -> VariantVerdict:
    steps, seconds = _speed(baseline, other, settings)
    return VariantVerdict(
        quality=_difference(*quality, baseline, other, settings),
        speed=steps,
        seconds=seconds,
        details=_details(baseline, other, replace(settings, comparisons=1)),
    )


def _difference(
    label: str,
    measure: Measure,
    baseline: list[PlainRun],
    other: list[PlainRun],
    settings: Settings,
) -> Figure | None:
    first, second = _groups(baseline, other, measure, settings)
    if not first or not second or not any(map(math.isfinite, (*first.values(), *second.values()))):
        return None
    scale = abs(mean([v for v in first.values() if math.isfinite(v)] or [0.0]))
    margin = settings.margin * scale
    found = _figure(label, first, second, settings, (-margin, margin))
    if settings.sign > 0:
        return found
    interval = None if found.interval is None else (-found.interval[1], -found.interval[0])
    return replace(
        found,
        estimate=-found.estimate,
        interval=interval,
        baseline={seed: -value for seed, value in found.baseline.items()},
        other={seed: -value for seed, value in found.other.items()},
    )


def _speed(
    baseline: list[PlainRun], other: list[PlainRun], settings: Settings
) -> tuple[Figure | None, Figure | None]:
    """Steps and seconds to a validation value that every run reaches, or to the target asked for.

    That value is the worst of the best validations of all runs of both variants, so that it
    favours neither. Diverged runs do not set it, and count as not reaching it.
    """
    finished = [run for run in (*baseline, *other) if not run.diverged]
    lowest = [value for run in finished if (value := figures.best_valid(run)) is not None]
    if not lowest:
        return None, None
    target = max(lowest) if settings.target is None else settings.sign * settings.target
    return _to_target("", target, baseline, other, settings, figures.validations)


def _to_target(
    prefix: str,
    target: float,
    baseline: list[PlainRun],
    other: list[PlainRun],
    settings: Settings,
    points: Callable[[PlainRun], Sequence[Point]],
) -> tuple[Figure | None, Figure | None]:
    runs = [run for run in (*baseline, *other) if run.points("valid") or run.diverged]
    met = {id(run): figures.crossing(points(run), target) for run in runs}
    starts = {id(run): points(run)[0] for run in runs if points(run)}
    if all(met[key] == point for key, point in starts.items()):
        return None, None  # all were there at their first validation
    found: list[Figure | None] = []
    for name in ("step", "seconds"):
        measure = partial(_time_of, met=met, name=name)
        known, others = ([run for run in some if id(run) in met] for some in (baseline, other))
        first, second = _groups(known, others, measure, settings)
        positive = all(value > 0 for value in (*first.values(), *second.values()))
        if not first or not second or not positive:
            found.append(None)
            continue
        margin = (math.log(1 - SPEED_MARGIN), math.log(1 + SPEED_MARGIN))
        label = f"{prefix}{'updates' if name == 'step' else name} to validation"
        figure = _figure(label, first, second, settings, margin, ratio=True)
        found.append(replace(figure, target=settings.sign * target))
    return found[0], found[1]


def _time_of(run: PlainRun, met: Mapping[int, Point | None], name: str) -> float | None:
    point = met[id(run)]
    return math.inf if point is None else getattr(point, name)


def _groups(
    baseline: Sequence[PlainRun], other: Sequence[PlainRun], measure: Measure, settings: Settings
) -> tuple[dict[int, float], dict[int, float]]:
    """The figures of baseline and variant by seed; of the seeds in common if they are paired."""
    first, second = _values(baseline, measure), _values(other, measure)
    if settings.paired:
        common = [seed for seed in first if seed in second]
        first, second = ({seed: values[seed] for seed in common} for values in (first, second))
    return first, second


def _values(runs: Sequence[PlainRun], measure: Measure) -> dict[int, float]:
    """The figure of each seed, infinite where the run diverged; empty if a run does not have it."""
    found: dict[int, float] = {}
    for run in runs:
        value = math.inf if run.diverged else measure(run)
        if value is None:
            return {}
        found[run.seed] = value
    return found


def _figure(
    label: str,
    baseline: dict[int, float],
    other: dict[int, float],
    settings: Settings,
    margin: tuple[float, float],
    ratio: bool = False,
) -> Figure:
    scaled = [
        {seed: math.log(value) if ratio else value for seed, value in values.items()}
        for values in (baseline, other)
    ]
    first, second = (list(values.values()) for values in scaled)
    back = _exp if ratio else float
    make = partial(Figure, label, baseline, other, ratio=ratio, paired=settings.paired)
    alone = min(len(first), len(second)) < 2
    if any(math.isinf(value) for value in (*first, *second)):
        low, high = figures.median(first), figures.median(second)
        p = min(rank_sum_p(first, second), separation_p(first, second))
        answer: Answer = "one seed" if alone else "not settled"
        if p <= 1 - settings.confidence and high != low:
            answer = "worse" if high > low else "better"
        known = math.isfinite(low) and math.isfinite(high)
        return make(answer=answer, estimate=back(high - low) if known else math.nan)
    if settings.paired:
        differences = [scaled[1][seed] - value for seed, value in scaled[0].items()]
        estimate, find = mean(differences), partial(paired_interval, differences)
    else:
        estimate, find = mean(second) - mean(first), partial(welch_interval, first, second)
    if alone:
        return make(answer="one seed", estimate=back(estimate))
    interval = find(settings.confidence)
    if interval.high - interval.low <= 1e-9 * max(map(abs, (*first, *second, estimate))):
        # Seeds that do not vary say nothing about the spread: a copied run, or coarse values.
        same = margin[0] < estimate < margin[1]
        return make(answer="equivalent" if same else "not settled", estimate=back(estimate))
    return make(
        answer=_answer(interval, margin),
        estimate=back(estimate),
        interval=(back(interval.low), back(interval.high)),
    )


def _answer(interval: Interval, margin: tuple[float, float]) -> Answer:
    if margin[0] < interval.low and interval.high < margin[1]:
        return "equivalent"
    if interval.high < 0:
        return "better"
    return "worse" if interval.low > 0 else "not settled"


def _details(
    baseline: list[PlainRun], other: list[PlainRun], settings: Settings
) -> dict[str, Figure]:
    both = [run for run in (*baseline, *other) if not run.diverged]
    found: dict[str, Figure | None] = {}
    valid = [run.points("valid") for run in both if run.points("valid")]
    difference = partial(_difference, baseline=baseline, other=other, settings=settings)
    if all(run.points("test") for run in both):
        found["best_validation"] = difference("best validation", figures.best_valid)
    found["last_validation"] = difference("last validation", figures.last_valid)
    found["train"] = difference("training", figures.last_train)
    found["gap"] = difference("validation minus training", figures.gap)
    if valid:
        first, last = max(p[0].step for p in valid), min(p[-1].step for p in valid)
        mean_value = partial(figures.area, first=first, last=last)
        found["area"] = difference("mean validation", mean_value)
    early = [figures.before_drop(run) for run in both]
    if early and all(early):
        target = max(min(p.value for p in points) for points in early)
        steps, _ = _to_target("early ", target, baseline, other, settings, figures.before_drop)
        found["speed_before_drop"] = steps
    return {name: figure for name, figure in found.items() if figure is not None}


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
