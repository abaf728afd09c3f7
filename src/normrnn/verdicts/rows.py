"""Rows of numbers from many runs, whatever form they come in."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from normrnn.errors import UsageError
from normrnn.files import read_text
from normrnn.terminal import one_line

COLUMNS = ("variant", "seed", "step", "split", "value")
BASELINE = "none"
SPLITS = ("train", "train_eval", "valid", "test")
_SPLITS = {"validation": "valid", "val": "valid"}
_NUMBERS = ("seed", "step", "value", "seconds", "lr")
_BLANK = ("", "none", "<na>", "nat")


class Point(NamedTuple):
    """One logged value."""

    step: float
    value: float
    seconds: float | None = None
    lr: float | None = None  # learning rate, where known


@dataclass
class PlainRun:
    """All values of one variant and seed, by split in the order of their steps.

    What methods say of the best holds where lower values are better.
    """

    variant: str
    seed: int
    splits: dict[str, list[Point]]
    diverged: bool = False  # whether it ended with NaN or infinite values, or the run says so
    error_rate: float | None = None
    """On test data, or at the best validation where runs have no test values."""
    complete: bool = True  # whether it is not still to be trained

    def points(self, split: str) -> list[Point]:
        """The finite values of a split."""
        return self.splits.get(split, [])

    def last(self, split: str) -> float | None:
        """The last value of a split."""
        points = self.points(split)
        return points[-1].value if points else None

    def best_valid(self) -> float | None:
        """The lowest validation value."""
        return min((point.value for point in self.points("valid")), default=None)

    def selected_test_value(self) -> float | None:
        """The test value at the best of the validations that have one, else the last test value."""
        tests = {point.step: point.value for point in self.points("test")}
        both = [point for point in self.points("valid") if point.step in tests]
        best = min(both, key=lambda point: point.value, default=None)
        return self.last("test") if best is None else tests[best.step]

    def gap(self) -> float | None:
        """Validation minus training value, both in eval mode, at the last step that has both."""
        train = {point.step: point.value for point in self.points("train_eval")}
        both = [p.value - train[p.step] for p in self.points("valid") if p.step in train]
        return both[-1] if both else None

    def before_drop(self) -> list[Point]:
        """The validations before the learning rate first falls; none if it is not known to fall."""
        points = self.points("valid")
        for number, (before, after) in enumerate(pairwise(points), 1):
            if before.lr is None or after.lr is None:
                return []
            if after.lr < before.lr:
                return points[:number]
        return []


def crossing(points: Sequence[Point], target: float) -> Point | None:
    """Where the values first reach a target, interpolated between two validations.

    A target that is met at the first validation counts as met there. None if it is never met.
    """
    at = next((i for i, point in enumerate(points) if point.value <= target), None)
    if not at:
        return None if at is None else points[0]
    before, after, seconds = points[at - 1], points[at], None
    share = (before.value - target) / (before.value - after.value)
    if before.seconds is not None and after.seconds is not None:
        seconds = before.seconds + share * (after.seconds - before.seconds)
    return Point(before.step + share * (after.step - before.step), target, seconds)


def read_rows(rows: Any) -> list[PlainRun]:
    """Runs from a list of dicts, a dict of lists, a DataFrame or the path of a CSV file.

    Columns: variant, seed, step, split ("valid", "test", "train_eval", …) and value; optionally
    seconds and lr. A variant of None or "" is called "none". Rows with an empty value are skipped.
    A run with a NaN or infinite value, and no finite one after it, diverged.
    """
    found: dict[tuple[str, int], list[tuple[str, Point]]] = {}
    for number, row in enumerate(_dicts(rows), 1):
        if missing := [name for name in COLUMNS if name not in row]:
            raise UsageError(f"row {number} has no {missing[0]!r}; rows need {', '.join(COLUMNS)}")
        seed, step, value, *more = (_number(row, name, number) for name in _NUMBERS)
        if not seed % 1 == 0:  # NaN, infinite or a fraction
            raise UsageError(f"row {number}: seed is {row['seed']!r}, not a whole number")
        if not math.isfinite(step):
            raise UsageError(f"row {number}: step is {row['step']!r}, not a finite number")
        point = Point(step, value, *(x if math.isfinite(x) else None for x in more))
        split = str(row["split"]).strip().lower()
        variant = row["variant"]
        key = BASELINE if _is_missing(variant) else one_line(str(variant)), int(seed)
        values = found.setdefault(key, [])
        if str(row["value"]).strip().lower() not in _BLANK:
            values.append((_SPLITS.get(split, split), point))
    if not found:
        raise UsageError("no rows to compare")
    return [_run(*key, points) for key, points in found.items()]


def _run(variant: str, seed: int, points: list[tuple[str, Point]]) -> PlainRun:
    splits: dict[str, list[Point]] = {}
    failed: dict[str, float] = {}
    for split, point in sorted(points, key=lambda item: item[1].step):
        if not math.isfinite(point.value):
            failed[split] = point.step
            continue
        values = splits.setdefault(split, [])
        if values and values[-1].step == point.step:
            where = f"variant {variant!r}, seed {seed} at step {point.step:g}"
            raise UsageError(f"two {split} values of {where}")
        values.append(point)
    last = max((values[-1].step for values in splits.values()), default=-math.inf)
    judged = {split: at for split, at in failed.items() if split in ("valid", "test")}
    diverged = any(at > last or split not in splits for split, at in judged.items())
    return PlainRun(variant, seed, splits, diverged)


def _dicts(rows: Any) -> Iterable[Mapping[str, Any]]:
    if isinstance(rows, str | Path):
        return csv.DictReader(read_text(Path(rows)).splitlines())
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # a DataFrame of pandas
        rows = rows.to_dict("list")
    if isinstance(rows, Mapping):
        try:
            columns = [list(values) for values in rows.values()]
            return [dict(zip(rows, row, strict=True)) for row in zip(*columns, strict=True)]
        except (TypeError, ValueError):
            raise UsageError("a dict of rows needs lists of equal lengths") from None
    if isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows):
        return rows
    raise UsageError(
        "rows should be a list of dicts, a dict of lists, a DataFrame, the path of a CSV file, or"
        f" run directories, not {type(rows).__name__}"
    )


def _is_missing(value: Any) -> bool:
    """Whether a cell is empty: None, "", NaN, or the missing values of pandas."""
    return str(value).strip().lower() in (*_BLANK, "nan")


def _number(row: Mapping[str, Any], name: str, number: int) -> float:
    """A cell as a number, NaN if it is missing."""
    value = row.get(name)
    try:
        return math.nan if _is_missing(value) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UsageError(f"row {number}: {name} is {value!r}, not a number") from None
