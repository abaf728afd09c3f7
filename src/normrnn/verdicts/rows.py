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
PAIRED = "paired"
BASELINE = "none"
SPLITS = {"validation": "valid", "val": "valid"}
"""Other names of splits."""


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
    """Whether it ended with NaN or infinite values, or the run says so."""
    paired: bool = False
    """Whether it shares initial weights and the order of data with the other runs of its seed."""

    def points(self, split: str) -> list[Point]:
        """The finite values of a split."""
        return self.splits.get(split, [])


def read_rows(rows: Any) -> list[PlainRun]:
    """Runs from a list of dicts, a dict of lists, a DataFrame or the path of a CSV file.

    Columns: variant, seed, step, split ("valid", "test", "train_eval", …) and value; optionally
    seconds, lr and paired. A variant of None or "" is called "none". An empty or NaN value is a
    missing one, unless a run has no finite value after it: then the run diverged.

    >>> row = {"variant": "frame", "seed": 1, "step": 10, "split": "valid", "value": 0.5}
    >>> read_rows([row, {**row, "step": 20, "value": 0.4}])[0].splits["valid"][1].value
    0.4
    """
    found: dict[tuple[str, int], list[tuple[str, Point]]] = {}
    paired: list[bool] = []
    for number, row in enumerate(_dicts(rows), 1):
        missing = [name for name in COLUMNS if name not in row]
        if missing:
            raise UsageError(f"row {number} has no {missing[0]!r}; rows need {', '.join(COLUMNS)}")
        seed, step = (_number(row, name, number) for name in ("seed", "step"))
        if seed != seed or seed % 1:  # NaN, infinite or a fraction
            raise UsageError(f"row {number}: seed is {row['seed']!r}, not a whole number")
        if not math.isfinite(step):
            raise UsageError(f"row {number}: step is {row['step']!r}, not a finite number")
        value = math.nan if _is_missing(row["value"]) else _number(row, "value", number)
        point = Point(step, value, *(_optional(row, name, number) for name in OPTIONAL))
        split = str(row["split"]).strip().lower()
        key = _variant(row["variant"]), int(seed)
        found.setdefault(key, []).append((SPLITS.get(split, split), point))
        paired.append(str(row.get(PAIRED)).lower() in ("true", "1", "1.0"))
    if not found:
        raise UsageError("no rows to compare")
    return [_run(*key, points, all(paired)) for key, points in found.items()]


def _run(variant: str, seed: int, points: list[tuple[str, Point]], paired: bool) -> PlainRun:
    run = PlainRun(variant, seed, paired=paired)
    failed: dict[str, float] = {}
    for split, point in sorted(points, key=lambda item: item[1].step):
        if not math.isfinite(point.value):
            failed[split] = point.step
            continue
        values = run.splits.setdefault(split, [])
        if values and values[-1].step == point.step:
            raise UsageError(
                f"two {split} values of variant {variant!r}, seed {seed} at step {point.step:g}"
            )
        values.append(point)
    last = max((p[-1].step for p in run.splits.values()), default=-math.inf)
    judged = {split: failed[split] for split in ("valid", "test") if split in failed}
    run.diverged = any(at > last or split not in run.splits for split, at in judged.items())
    return run


def to_rows(runs: Sequence[PlainRun]) -> list[dict[str, Any]]:
    """The rows of runs, as `read_rows` takes them."""
    rows = []
    for run in runs:
        for split, points in run.splits.items():
            for point in points:
                row = {"variant": run.variant, "seed": run.seed, "split": split}
                extra = {k: v for k in OPTIONAL if (v := getattr(point, k)) is not None}
                rows.append({**row, "step": point.step, "value": point.value, **extra})
        if run.diverged:
            last = max((points[-1].step for points in run.splits.values()), default=0)
            row = {"variant": run.variant, "seed": run.seed, "split": "valid"}
            rows.append({**row, "step": last + 1, "value": math.nan})
    paired = all(run.paired for run in runs)
    return [{**row, PAIRED: True} for row in rows] if paired else rows


def write_csv(path: Path, runs: Sequence[PlainRun]) -> None:
    """Write the rows of runs as a CSV file that `normrnn verdict` reads."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS, *OPTIONAL, PAIRED], restval="")
    writer.writeheader()
    writer.writerows(to_rows(runs))
    write_whole(path, text.getvalue().encode())


def _dicts(rows: Any) -> Iterable[Mapping[str, Any]]:
    if isinstance(rows, str | Path):
        try:
            text = read_regular(Path(rows)).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UsageError(f"{rows} is not a CSV file in UTF-8") from None
        return list(csv.DictReader(text.splitlines()))
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # a DataFrame of pandas
        rows = rows.to_dict("list")
    if isinstance(rows, Mapping):
        scalars = [k for k, v in rows.items() if isinstance(v, str) or not hasattr(v, "__iter__")]
        if scalars:
            raise UsageError(f"column {scalars[0]!r} should be a list of values")
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


def _is_missing(value: Any) -> bool:
    """Whether a cell is empty: None, "", NaN, or the missing values of pandas."""
    return value is None or value == "" or str(value).lower() in ("nan", "<na>", "nat")


def _variant(value: Any) -> str:
    if value is None or str(value).lower() in ("", "nan", "<na>"):
        return BASELINE
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def _number(row: Mapping[str, Any], name: str, number: int) -> float:
    try:
        return float(row[name])
    except (TypeError, ValueError):
        raise UsageError(f"row {number}: {name} is {row[name]!r}, not a number") from None


def _optional(row: Mapping[str, Any], name: str, number: int) -> float | None:
    if _is_missing(row.get(name)):
        return None
    value = _number(row, name, number)
    return value if math.isfinite(value) else None
