"""What one run comes to: quality, crossing of a target, gap. Lower values are better here."""

from collections.abc import Sequence
from itertools import pairwise

from normrnn.verdicts.rows import PlainRun, Point


def best(run: PlainRun) -> Point | None:
    """The validation with the lowest value, the first of equal ones."""
    return min(run.points("valid"), key=lambda point: point.value, default=None)


def selected_test_value(run: PlainRun) -> float | None:
    """The test value at the step of the best validation, else the last test value."""
    points, selected = run.points("test"), best(run)
    at_best = [p.value for p in points if selected is not None and p.step == selected.step]
    return at_best[-1] if at_best else last(run, "test")


def best_valid(run: PlainRun) -> float | None:
    """The lowest validation value."""
    selected = best(run)
    return None if selected is None else selected.value


def last(run: PlainRun, split: str) -> float | None:
    """The last value of a split."""
    points = run.points(split)
    return points[-1].value if points else None


def gap(run: PlainRun) -> float | None:
    """Validation minus training value, both in eval mode, at the last step that has both."""
    train = {point.step: point.value for point in run.points("train_eval")}
    both = [p.value - train[p.step] for p in run.points("valid") if p.step in train]
    return both[-1] if both else None


def before_drop(run: PlainRun) -> list[Point]:
    """The validations before the learning rate first falls; none where it is not known to fall."""
    points = run.points("valid")
    for number, (before, after) in enumerate(pairwise(points), 1):
        if before.lr is None or after.lr is None:
            return []
        if after.lr < before.lr:
            return points[:number]
    return []


def crossing(points: Sequence[Point], target: float) -> Point | None:
    """Where the values first reach a target, interpolated between two validations.

    A target that is met at the first validation counts as met there. None if it is never met.

    >>> crossing([Point(10, 5.0), Point(20, 3.0)], 4.0).step
    15.0
    """
    before = None
    for point in points:
        if point.value <= target:
            return point if before is None else _between(before, point, target)
        before = point
    return None


def _between(before: Point, after: Point, target: float) -> Point:
    share = (before.value - target) / (before.value - after.value)
    seconds = None
    if before.seconds is not None and after.seconds is not None:
        seconds = before.seconds + share * (after.seconds - before.seconds)
    return Point(before.step + share * (after.step - before.step), target, seconds)
