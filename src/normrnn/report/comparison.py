"""How a normalised arm compares with its baseline, seed by seed: the numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean
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
NO_GAP = 0.02
"""Nats: a smaller gap between training and validation is none, and so is a smaller difference."""
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
    steps: tuple[Point, ...] = ()
    """Per seed, between two looks at that time: updates and seconds."""
    at_once: tuple[tuple[bool, bool], ...] = ()
    """Per seed, whether the baseline and the other were there when first looked at."""

    @property
    def reached(self) -> bool:
        """By every run."""
        return bool(self.losses) and None not in (*self.baseline, *self.other)

    @property
    def too_early(self) -> bool:
        """Whether all were there when first looked at: which was sooner is not known."""
        return self.reached and all(map(all, self.at_once))

    @property
    def sooner(self) -> int:
        """Seeds in which the other was there with fewer updates, the baseline perhaps never."""
        pairs = zip(self.baseline, self.other, strict=True)
        return sum(b is not None and (a is None or b.updates < a.updates) for a, b in pairs)


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
    broken: tuple[Pair, ...] = ()
    """Seeds of which a run diverged, where others finished: in no mean, but counted."""
    shorter: int = 0
    """Seeds that got less far than those compared: a mean over both would say nothing."""

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
        losses, firsts, seeds, steps, at_once = [], [], [], [], []
        for run, other in self.pairs:
            curves = points(run), points(other)
            if not all(curves):
                continue
            low = min(p.loss for p in curves[0]) if self.asked is None else self._nats(curves)
            losses.append(low)
            seeds.append(run.seed)
            first = [first_below(curve, low) for curve in curves]
            firsts.append(first)
            at_once.append(tuple(p is curve[0] for p, curve in zip(first, curves, strict=True)))
            steps.append(_widest(curves, first))
        where = "validation" if held_out else "training"
        first, second = (tuple(pair[i] for pair in firsts) for i in (0, 1))
        known = tuple(seeds), tuple(steps), tuple(at_once)
        return Target(where, tuple(losses), first, second, self.asked, *known)

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
    def not_timed(self) -> str:
        """Why seconds cannot be compared; empty if they can: of long runs, made in the same
        surroundings."""
        both = [run for pair in self.pairs for run in pair]
        if not all(same_surroundings(pair) for pair in self.pairs):
            return "the runs were made in different surroundings"
        if any(run.seconds < LONG_ENOUGH for run in both):
            return "the runs are too short to be timed"
        return "" if all(run.environments for run in both) else "where the runs ran is not recorded"

    @property
    def diverged(self) -> dict[str, int]:
        """Runs that did, by arm."""
        arms = {"baseline": self.baseline, "other": self.other}
        return {name: sum(bool(run.diverged) for run in arm.runs) for name, arm in arms.items()}

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
            **{
                f"best_with_{kind}_statistics": self._difference(
                    held_out, lambda run, kind=kind: held_out(run, kind)
                )
                for kind in ("running", "recalibrated", "batch")
                if any(other.serving != kind for _, other in self.pairs)
            },
            "gap": self._gaps(),
            **self._to_target(),
        }
        return {name: difference for name, difference in found.items() if difference.seeds}

    def _difference(self, figure: Figure, others: Figure | None = None) -> Difference:
        def both(pair: Pair) -> tuple[float | None, float | None]:
            return figure(pair[0]), (others or figure)(pair[1])

        values = [(pair[0].seed, *both(pair)) for pair in self.pairs]
        found = _paired([(s, a, b) for s, a, b in values if a is not None and b is not None])
        lost = [
            [math.inf if r.diverged or x is None else x for r, x in zip(p, both(p), strict=True)]
            for p in self.broken
        ]
        return self._spoilt(replace(found, diverged=tuple((a, b) for a, b in lost)))

    def _spoilt(self, found: Difference) -> Difference:
        """With a note of it where a run of either arm diverged, compared or not."""
        return replace(found, spoilt=any(self.diverged.values()))

    def _gaps(self) -> Difference:
        """Validation minus training loss, at the last validation that both have: the same number
        of updates, or as many validations where updates are of different sizes."""
        values, same = [], self.same_updates
        for pair in self.pairs:
            a, b = (
                {row["updates"] if same else i: row["gap"] for i, row in enumerate(gap(run))}
                for run in pair
            )
            if common := a.keys() & b.keys():
                values.append((pair[0].seed, a[max(common)], b[max(common)]))
        return self._spoilt(_paired(values))

    def _to_target(self) -> dict[str, Difference]:
        """Nothing unless every run reached it, since a mean over those that did flatters; nor if
        all were there when first looked at."""
        target, found = self.target, {}
        if not target.reached or target.too_early:
            return {}
        lost = [[math.inf if run.diverged else 0.0 for run in pair] for pair in self.broken]
        for what, wanted in (("updates", self.same_updates), ("seconds", not self.not_timed)):
            if not wanted:
                continue
            firsts = zip(target.seeds, target.baseline, target.other, strict=True)
            values = [(s, getattr(a, what), getattr(b, what)) for s, a, b in firsts]
            if min(min(a, b) for _, a, b in values) <= 0:
                continue  # no time at all: not measured
            steps = [
                getattr(step, what) * math.hypot(1 / a, 1 / b) / math.sqrt(2)
                for step, (_, a, b) in zip(target.steps, values, strict=True)
            ]
            found[f"{what}_to_target"] = self._spoilt(
                replace(
                    _paired(values, True),
                    resolution=mean(steps),
                    at_least=_at_least(target.at_once),
                    diverged=tuple((a, b) for a, b in lost),
                )
            )
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
            "left_out": self.left_out,
            "shorter": self.shorter,
            "going": self.going,
            "cut": self.cut,
            "diverged": self.diverged,
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
    """Pairs that have finished, up to the epoch at which most can be compared; or, where none has,
    those that got furthest, as far as both got."""
    first, second = ({run.seed: run for run in arm.runs} for arm in (baseline, other))
    every = [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]
    over = [pair for pair in every if all(map(ended, pair))]
    finished = [pair for pair in over if all(run.finished for run in pair)]
    broken = [pair for pair in over if not all(run.finished for run in pair)]
    if not finished:
        broken = []
    chosen = finished or every
    far = [min(run.epochs_done for run in pair) for pair in chosen]
    length = _common_length(far) if finished else max(far, default=0)
    longer = any(run.epochs_done > length for pair in finished for run in pair)
    most = [
        (_first_epochs(a, length), _first_epochs(b, length)) if finished else (a, b)
        for (a, b), epochs in zip(chosen, far, strict=True)
        if epochs >= length
    ]
    uneven = [not finished or _uneven(a, b) for a, b in most]
    pairs = [_as_far(*p) if cut else p for p, cut in zip(most, uneven, strict=True)]
    left_out, shorter = len(every) - len(chosen) - len(broken), len(chosen) - len(most)
    cut = bool(finished) and (longer or any(uneven))
    how = not finished, target, cut, tuple(broken), shorter
    return Comparison(baseline, other, pairs, left_out, *how)


def _common_length(epochs: Sequence[int]) -> int:
    """Return the number of epochs with which seeds times epochs is largest.

    >>> _common_length([4, 3, 3]), _common_length([15, 15, 1])
    (3, 15)
    """
    return max(sorted(epochs, reverse=True), key=lambda n: n * sum(e >= n for e in epochs))


def _first_epochs(run: Run, epochs: int) -> Run:
    """Return a run as it was after so many epochs."""
    if run.epochs_done <= epochs:
        return run
    kept = [row for row in run.rows if row["epoch"] <= epochs and row["split"] != "test"]
    return replace(run, rows=kept)


def _uneven(a: Run, b: Run) -> bool:
    """Whether one has trained longer: for more epochs, or for larger ones."""
    counts = sorted((_count(a), _count(b)))
    return a.epochs_done != b.epochs_done or counts[1] > 1.05 * counts[0]


def ended(run: Run) -> bool:
    """Whether it will go on no more: finished, or diverged."""
    return run.finished or bool(run.diverged)


def same_surroundings(runs: Sequence[Run]) -> bool:
    """Whether they were made on the same machine and device with the same software, as far as that
    is known."""
    first, *others = ((run.environments, run.settings.get("device")) for run in runs)
    return all(other == first for other in others)


def _widest(curves: Sequence[Sequence[Point]], firsts: Sequence[Point | None]) -> Point:
    """The wider of the steps from the look before to these."""
    widest = Point(0, 0.0, 0.0)
    for curve, first in zip(curves, firsts, strict=True):
        at = 0 if first is None else curve.index(first)
        if len(curve) > 1 and first is not None:
            a, b = (curve[0], curve[1]) if not at else (curve[at - 1], first)
            widest = max(widest, Point(b.updates - a.updates, b.seconds - a.seconds, 0.0))
    return widest


def _at_least(at_once: Sequence[tuple[bool, bool]]) -> bool:
    """Whether some other run was there when first looked at, and no baseline ever was: that may
    have been sooner too."""
    return any(other for _, other in at_once) and not any(baseline for baseline, _ in at_once)


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
