"""Rows of numbers from many runs, whatever form they come in."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from normrnn.errors import UsageError
from normrnn.files import read_regular, write_whole

COLUMNS = ("variant", "seed", "step", "split", "value")
OPTIONAL = ("seconds", "lr")
BASELINE = "none"


class Point(NamedTuple):
    """One logged value."""

    step: float
    value: float
    seconds: float | None = None
    lr: float | None = None
    """Learning rate, where known."""


@dataclass
class PlainRun:
    """All values of one variant and seed, by split in the order of their steps."""

    variant: str
    seed: int
    splits: dict[str, list[Point]] = field(default_factory=dict)
    diverged: bool = False
    """Whether a value was NaN or infinite, or the run says so."""

    def points(self, split: str) -> list[Point]:
        """The finite values of a split."""
        return self.splits.get(split, [])


def read_rows(rows: Any) -> list[PlainRun]:
    """Runs from a list of dicts, a dict of lists, a DataFrame or the path of a CSV file.

    Columns: variant, seed, step, split ("valid", "test", "train_eval", …) and value; optionally
    seconds and lr. A variant of None or "" is called "none".

    >>> row = {"variant": "frame", "seed": 1, "step": 10, "split": "valid", "value": 0.5}
    >>> read_rows([row, {**row, "step": 20, "value": 0.4}])[0].splits["valid"][1].value
    0.4
    """
    runs: dict[tuple[str, int], PlainRun] = {}
    for number, row in enumerate(_dicts(rows), 1):
        missing = [name for name in COLUMNS if name not in row]
        if missing:
            raise UsageError(f"row {number} has no {missing[0]!r}; rows need {', '.join(COLUMNS)}")
        variant, seed = _variant(row["variant"]), int(_number(row, "seed", number))
        run = runs.setdefault((variant, seed), PlainRun(variant, seed))
        value = _number(row, "value", number)
        if not math.isfinite(value):
            run.diverged = True
            continue
        extra = [_optional(row, name, number) for name in OPTIONAL]
        point = Point(_number(row, "step", number), value, *extra)
        points = run.splits.setdefault(str(row["split"]), [])
        if any(point.step == other.step for other in points[-1:]):
            raise UsageError(
                f"row {number}: two {row['split']} values of variant {variant!r}, seed {seed} at"
                f" step {point.step:g}"
            )
        points.append(point)
    if not runs:
        raise UsageError("no rows to compare")
    for run in runs.values():
        for points in run.splits.values():
            points.sort(key=lambda point: point.step)
    return list(runs.values())


def to_rows(runs: Iterable[PlainRun]) -> list[dict[str, Any]]:
    """The rows of runs, as `read_rows` takes them."""
    rows = []
    for run in runs:
        for split, points in run.splits.items():
            for point in points:
                row = {"variant": run.variant, "seed": run.seed, "split": split}
                extra = {k: v for k in OPTIONAL if (v := getattr(point, k)) is not None}
                rows.append({**row, "step": point.step, "value": point.value, **extra})
        if run.diverged:
            row = {"variant": run.variant, "seed": run.seed, "split": "valid"}
            rows.append({**row, "step": 0, "value": math.nan})
    return rows


def write_csv(path: Path, runs: Iterable[PlainRun]) -> None:
    """Write the rows of runs as a CSV file that `normrnn verdict` reads."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS, *OPTIONAL], restval="")
    writer.writeheader()
    writer.writerows(to_rows(runs))
    write_whole(path, text.getvalue().encode())


def _dicts(rows: Any) -> Iterable[Mapping[str, Any]]:
    if isinstance(rows, str | Path):
        text = read_regular(Path(rows)).decode("utf-8-sig")
        return list(csv.DictReader(text.splitlines()))
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # a DataFrame of pandas
        rows = rows.to_dict("list")
    if isinstance(rows, Mapping):
        columns = {name: list(values) for name, values in rows.items()}
        sizes = {len(values) for values in columns.values()}
        if len(sizes) > 1:
            raise UsageError(f"columns have different lengths: {sorted(sizes)}")
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, values, strict=True)) for values in rows]
    if isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows):
        return rows
    raise UsageError(
        "rows should be a list of dicts, a dict of lists, a DataFrame, the path of a CSV file, or"
        f" run directories, not {type(rows).__name__}"
    )


def _variant(value: Any) -> str:
    missing = value is None or value == "" or value != value  # NaN: how pandas reads an empty cell
    return BASELINE if missing else str(value)


def _number(row: Mapping[str, Any], name: str, number: int) -> float:
    try:
        return float(row[name])
    except (TypeError, ValueError):
        raise UsageError(f"row {number}: {name} is {row[name]!r}, not a number") from None


def _optional(row: Mapping[str, Any], name: str, number: int) -> float | None:
    if row.get(name) in (None, ""):
        return None
    value = _number(row, name, number)
    return value if math.isfinite(value) else None
