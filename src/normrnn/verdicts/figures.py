"""What one run comes to: quality, crossing of a target, area, gap. Lower values are better here."""

import math
from collections.abc import Sequence
from itertools import pairwise

from normrnn.verdicts.rows import PlainRun, Point


def validations(run: PlainRun) -> list[Point]:
    """All validations."""
    return run.points("valid")


def best(run: PlainRun) -> Point | None:
    """The validation with the lowest value, the first of equal ones."""
    return min(run.points("valid"), key=lambda point: point.value, default=None)


def selected_test_value(run: PlainRun) -> float | None:
    """The test value at the step of the best validation, else the last test value."""
    points, selected = run.points("test"), best(run)
    at_best = [p.value for p in points if selected is not None and p.step == selected.step]
    return at_best[-1] if at_best else points[-1].value if points else None


def best_valid(run: PlainRun) -> float | None:
    """The lowest validation value."""
    selected = best(run)
    return None if selected is None else selected.value


def last_valid(run: PlainRun) -> float | None:
    """The last validation value."""
    points = run.points("valid")
    return points[-1].value if points else None


def last_train(run: PlainRun) -> float | None:
    """The last training value in eval mode."""
    points = run.points("train_eval")
    return points[-1].value if points else None


def gap(run: PlainRun) -> float | None:
    """Validation minus training value, both in eval mode, at the last step that has both."""
    train = {point.step: point.value for point in run.points("train_eval")}
    both = [p.value - train[p.step] for p in run.points("valid") if p.step in train]
    return both[-1] if both else None


def area(run: PlainRun, first: float, last: float) -> float | None:
    """The mean validation value between two steps, by the trapezoidal rule.

    Values at the two steps are interpolated, so that runs validated at other steps are comparable.
    """
    points = run.points("valid")
    if not points or points[0].step > first or points[-1].step < last or first >= last:
        return None
    inside = [p for p in points if first < p.step < last]
    ends = [Point(step, _value_at(points, step)) for step in (first, last)]
    several = [ends[0], *inside, ends[1]]
    total = sum((b.step - a.step) * (a.value + b.value) / 2 for a, b in pairwise(several))
    return total / (last - first)


def _value_at(points: Sequence[Point], step: float) -> float:
    """The value at a step, interpolated between the validations around it."""
    for before, after in pairwise(points):
        if before.step <= step <= after.step:
            share = (step - before.step) / (after.step - before.step)
            return _between(before.value, after.value, share)
    return points[-1].value


def before_drop(run: PlainRun) -> list[Point]:
    """The validations before the learning rate first falls; none where it is not known to fall."""
    points = run.points("valid")
    rates = [point.lr for point in points]
    for number, (before, after) in enumerate(pairwise(rates), 1):
        if before is None or after is None:
            return []
        if after < before:
            return points[:number]
    return []


def crossing(points: Sequence[Point], target: float) -> Point | None:
    """Where the values first reach a target, interpolated between two validations.

    A target that is met at the first validation counts as met there. None if it is never met.

    >>> crossing([Point(10, 5.0), Point(20, 3.0)], 4.0).step
    15.0
    """
    for number, point in enumerate(points):
        if point.value <= target:
            if number == 0:
                return point
            before = points[number - 1]
            share = (before.value - target) / (before.value - point.value)
            times = (before.seconds, point.seconds)
            seconds = None if None in times else _between(*times, share)  # type: ignore[arg-type]
            return Point(_between(before.step, point.step, share), target, seconds)
    return None


def _between(a: float, b: float, share: float) -> float:
    return a + share * (b - a)


def median(values: Sequence[float]) -> float:
    """The median, infinite values allowed."""
    ordered, n = sorted(values), len(values)
    low, high = ordered[(n - 1) // 2], ordered[n // 2]
    return high if math.isinf(high) and low != high else (low + high) / 2
