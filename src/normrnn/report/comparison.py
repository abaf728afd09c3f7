"""How a normalised arm compares with its baseline, seed by seed: the numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from normrnn.config.measure import Measure
from normrnn.report.curves import (
    Point,
    best,
    first_below,
    gap,
    trailing_average,
    validations,
    whole_epochs,
)
from normrnn.report.groups import Arm
from normrnn.report.measure import measure
from normrnn.report.paired import Difference
from normrnn.report.runs import Row, Run

LONG_ENOUGH = 30.0
"""Seconds: what a shorter run took says nothing of speed."""
Pair = tuple[Run, Run]
Figure = Callable[[Run], float | None]


@dataclass(frozen=True)
class Target:
    """A loss to reach, in nats, per seed; and when each run was first there, if it was.

    Unless the user names one in the measure's unit (`asked`), on validation, it is the baseline's
    best in training, or in validation where training is no measure.
    """

    where: str
    losses: tuple[float, ...]
    baseline: tuple[Point | None, ...]
    other: tuple[Point | None, ...]
    asked: float | None = None
    seeds: tuple[int, ...] = ()
    """Those that have come so far."""

    @property
    def reached(self) -> bool:
        """By every run."""
        return bool(self.losses) and None not in (*self.baseline, *self.other)


@dataclass(frozen=True)
class Comparison:
    """Two arms, paired by seed: `pairs` (baseline, other) that finished, or all as far as both got
    if none has (`going`)."""

    baseline: Arm
    other: Arm
    pairs: list[Pair]
    left_out: int = 0
    """Seeds that had not finished."""
    going: bool = False
    asked: float | None = None
    """A target on validation, in the measure's unit."""
    cut: bool = False
    """Whether finished runs were compared up to where the shorter one ends."""

    @cached_property
    def measure(self) -> Measure:
        """What both are measured in."""
        return measure([*self.baseline.runs, *self.other.runs])

    @property
    def seeds(self) -> list[int]:
        """Those compared."""
        return [run.seed for run, _ in self.pairs]

    @cached_property
    def target(self) -> Target:
        """Of the pairs that have trained for an epoch, or been validated."""
        looks_ahead = any(other.looks_ahead for _, other in self.pairs)
        held_out = looks_ahead or self.asked is not None
        points = validations if held_out else trailing_average
        losses, firsts, seeds = [], [], []
        for run, other in self.pairs:
            curves = points(run), points(other)
            if not all(curves):
                continue
            low = min(p.loss for p in curves[0]) if self.asked is None else self._nats(curves)
            losses.append(low)
            seeds.append(run.seed)
            firsts.append([first_below(curve, low) for curve in curves])
        where = "validation" if held_out else "training"
        first, second = (tuple(pair[i] for pair in firsts) for i in (0, 1))
        return Target(where, tuple(losses), first, second, self.asked, tuple(seeds))

    def _nats(self, curves: Sequence[Sequence[Point]]) -> float:
        """The highest loss seen that is no worse than the target asked for; none is below −∞."""
        asked = self.asked
        assert asked is not None
        losses = [p.loss for curve in curves for p in curve if self.measure.of(p.loss) <= asked]
        return max(losses, default=float("-inf"))

    @property
    def same_updates(self) -> bool:
        """Whether an update of both arms sees as much: other batches make other updates."""
        sizes = [_count(run) / run.updates for pair in self.pairs for run in pair if run.updates]
        return max(sizes, default=0) <= 1.05 * min(sizes, default=0)

    @property
    def timed(self) -> bool:
        """Whether seconds can be compared: long runs, made in the same surroundings."""
        both = [run for pair in self.pairs for run in pair]
        alike = all(a.environments == b.environments for a, b in self.pairs)
        return alike and all(run.seconds >= LONG_ENOUGH for run in both)

    @cached_property
    def figures(self) -> dict[str, Difference]:
        """By name, each over the seeds that have it in both arms; lower is better."""
        shown = self.measure.of

        def trained(run: Run) -> float | None:
            losses = [] if run.looks_ahead else [row["loss"] for row in whole_epochs(run)]
            return shown(min(losses)) if losses else None

        def held_out(run: Run, statistics: str = "") -> float | None:
            row = best(run, "valid", statistics or run.serving)
            return None if row is None else shown(row["loss"])

        def last(run: Run) -> float | None:
            rows = run.split("valid", run.serving)
            return shown(rows[-1]["loss"]) if rows else None

        def errors(run: Run) -> float | None:
            row = best(run, "valid", run.serving, "fer")
            return None if row is None else row["fer"]

        found = {
            "best_training": self._difference(trained),
            "best_validation": self._difference(held_out),
            "final_validation": self._difference(last),
            "best_frame_error_rate": self._difference(errors),
            "best_with_batch_statistics": self._difference(
                held_out, lambda run: held_out(run, "batch")
            ),
            "gap": self._gaps(),
            **self._to_target(),
        }
        return {name: difference for name, difference in found.items() if difference.seeds}

    def _difference(self, figure: Figure, others: Figure | None = None) -> Difference:
        values = [(a.seed, figure(a), (others or figure)(b)) for a, b in self.pairs]
        return _paired([(s, a, b) for s, a, b in values if a is not None and b is not None])

    def _gaps(self) -> Difference:
        """Validation minus training loss, at the last validation that both have."""
        values = []
        for pair in self.pairs:
            a, b = ({row["updates"]: row["gap"] for row in gap(run)} for run in pair)
            if common := a.keys() & b.keys():
                values.append((pair[0].seed, a[max(common)], b[max(common)]))
        return _paired(values)

    def _to_target(self) -> dict[str, Difference]:
        """Nothing unless every run reached it: a mean over those that did flatters."""
        target, values = self.target, []
        if target.reached:
            values = list(zip(target.seeds, target.baseline, target.other, strict=True))
        found = {}
        if self.same_updates:
            updates = [(s, a.updates, b.updates) for s, a, b in values]  # type: ignore[union-attr]
            found["updates_to_target"] = _paired(updates, True)
        if self.timed:
            seconds = [(s, a.seconds, b.seconds) for s, a, b in values]  # type: ignore[union-attr]
            found["seconds_to_target"] = _paired(seconds, True)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        target = self.target
        when = {
            name: [None if p is None else {"updates": p.updates, "seconds": p.seconds} for p in arm]
            for name, arm in (("baseline", target.baseline), ("other", target.other))
        }
        return {
            "baseline": self.baseline.name,
            "other": self.other.name,
            "measure": self.measure.name,
            "seeds": self.seeds,
            "target": {
                "where": target.where,
                "asked": target.asked,
                "seeds": list(target.seeds),
                **when,
            },
            "figures": {name: figure.to_dict() for name, figure in self.figures.items()},
        }


def _paired(values: Sequence[tuple[int, float, float]], relative: bool = False) -> Difference:
    seeds, baseline, other = (tuple(value[i] for value in values) for i in range(3))
    return Difference(tuple(map(int, seeds)), baseline, other, relative)


def compared(baseline: Arm, other: Arm, target: float | None = None) -> Comparison:
    """Pairs that have finished, those of different lengths as far as both got; or all, as far as
    both got, where none has."""
    first, second = ({run.seed: run for run in arm.runs} for arm in (baseline, other))
    every = [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]
    finished = [pair for pair in every if all(run.finished for run in pair)]
    uneven = [a.epochs_done != b.epochs_done for a, b in finished]
    pairs = [_as_far(*p) if far else p for p, far in zip(finished, uneven, strict=True)]
    pairs = pairs or [_as_far(*pair) for pair in every]
    left_out = len(every) - len(pairs)
    return Comparison(baseline, other, pairs, left_out, not finished, target, any(uneven))


def _as_far(*runs: Run) -> Pair:
    """Both runs up to the last row by which both have seen as much, and been validated as often."""
    least = min(map(_count, runs))
    cut = [replace(run, rows=_until(run, least)) for run in runs]
    times = min(len(run.split("valid", run.serving)) for run in cut)
    a, b = (replace(run, rows=_validated(run, times)) for run in cut)
    return a, b


def _until(run: Run, least: int) -> list[Row]:
    seen, last = 0, 0
    for row in run.split("train"):
        seen += row["count"]
        if seen <= least:
            last = row["updates"]
    return [row for row in run.rows if row["updates"] <= last]


def _validated(run: Run, times: int) -> list[Row]:
    """Without what was measured after so many validations: the other is in the middle of one."""
    rows = run.split("valid", run.serving)
    if len(rows) <= times:
        return run.rows
    last = rows[times - 1]["updates"] if times else 0
    return [row for row in run.rows if row["split"] == "train" or row["updates"] <= last]


def _count(run: Run) -> int:
    """Tokens or frames trained on."""
    return sum(row["count"] for row in run.split("train"))
