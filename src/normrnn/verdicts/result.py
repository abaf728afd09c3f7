"""A verdict to print, to show in a notebook, or to keep as data."""

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from normrnn.errors import UsageError
from normrnn.verdicts import verdict
from normrnn.verdicts.rows import BASELINE, SPLITS, PlainRun
from normrnn.verdicts.verdict import CONFIDENCE, Comparison, Figure, Settings

COLUMNS = 80
_BRIEF = 2


@dataclass(frozen=True, repr=False)
class Verdict:
    """Each variant against the baseline. `print` it for the answer; `details()` has the rest."""

    baseline: str
    variants: Mapping[str, verdict.VariantVerdict]
    runs: Sequence[PlainRun]
    ranking: Sequence[tuple[str, float]] = ()
    """All variants with their quality, the best first, without those that diverged."""
    notes: Sequence[str] = ()  # runs that lack values which others have
    measure: str = "value"
    paired: bool = False
    higher_is_better: bool = False
    title: str = ""

    @property
    def diverged(self) -> dict[str, list[int]]:
        """Variants with runs that diverged: how many of how many."""
        every = Counter(run.variant for run in self.runs)
        bad = Counter(run.variant for run in self.runs if run.diverged)
        return {name: [bad[name], count] for name, count in every.items() if bad[name]}

    def lines(self, details: bool = False) -> list[str]:
        """Return quality and speed of every variant; with `details`, all figures."""
        lines = textwrap.wrap(f"{self.title}:", COLUMNS) if self.title else []
        for name, (bad, n) in self.diverged.items():
            lines.append(f"{_truncate(name)}: {bad} of {n} runs diverged")
        for note in self.notes:
            lines += textwrap.wrap(note, COLUMNS, subsequent_indent="  ")
        for name, one in self.variants.items():
            shown = list(one.primary.values())[:_BRIEF]
            shown = [*one.primary.values(), *one.details.values()] if details else shown
            seeds = ": no values in common"
            if shown:
                n, m = len(shown[0].other), len(shown[0].baseline)
                seeds = f", {n} seed{'s' * (n > 1)}:" if n == m else f", {n} vs {m} seeds:"
            lines.append(f"{_truncate(name)}{seeds}")
            for figure in shown:
                label, other, baseline, difference = cells(figure, self.measure)
                colon = ":" if figure.ratio else ""
                values = f"  {label}{colon} {other} vs {baseline}"
                lines += _wrapped("  ", [values, difference, figure.answer])
        if len(self.variants) > 1 and len(self.ranking) > 2:
            ranked = [f"{_truncate(name)} {value:.4g}" for name, value in self.ranking]
            lines += _wrapped(" ", ["ranking:", *(f"{one}," for one in ranked[:-1]), ranked[-1]])
        if not self.variants:
            lines.append(f"only one variant, {self.baseline}: nothing to compare it with")
        return lines

    def details(self) -> str:
        """Return all figures, and how they were computed."""
        kind = "Paired" if self.paired else "Welch's"
        method = (
            f"{kind} t intervals, 95 %; those of test values and speed simultaneous over all"
            " variants. Training values in eval mode; early: before the learning rate drops."
        )
        return "\n".join([*self.lines(details=True), *textwrap.wrap(method, COLUMNS)])

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        answers = ", ".join(
            f"{name}: {one.quality.answer if one.quality else 'no values'}"
            for name, one in self.variants.items()
        )
        return f"<Verdict against {self.baseline!r}: {answers}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        names = ("baseline", "measure", "paired", "higher_is_better", "notes", "diverged")
        return {
            **{name: getattr(self, name) for name in names},
            "ranking": [[name, value] for name, value in self.ranking],
            "variants": {name: one.to_dict() for name, one in self.variants.items()},
        }


def verdict_of(
    runs: Sequence[PlainRun],
    settings: Settings | None = None,
    measure: str = "value",
    title: str = "",
) -> Verdict:
    """Compare every variant with the baseline, in the order of the runs."""
    settings = settings or Settings()
    variants = _variants(runs, settings.sign)
    name = BASELINE if BASELINE in variants else next(iter(variants))
    name = name if settings.baseline is None else str(settings.baseline)
    if name not in variants:
        raise UsageError(f"baseline {name!r} is not one of {', '.join(map(repr, variants))}")
    label, quality = "best validation", PlainRun.best_valid
    if all(run.points("test") for run in runs if not run.diverged):
        label, quality = "test", PlainRun.selected_test_value
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(variants) - 1)  # by Bonferroni
    values = {other: verdict.values_by_seed(some, quality) for other, some in variants.items()}
    middles = {other: verdict.middle(some.values()) for other, some in values.items() if some}
    ranking = sorted(middles.items(), key=lambda pair: pair[1])  # medians if some runs diverged
    return Verdict(
        name,
        {
            other: Comparison(variants[name], runs_of, settings, confidence).verdict(label, quality)
            for other, runs_of in variants.items()
            if other != name
        },
        runs,
        [(name, settings.sign * value) for name, value in ranking if math.isfinite(value)],
        _notes(runs),
        measure,
        settings.paired,
        settings.higher_is_better,
        title,
    )


def _variants(runs: Sequence[PlainRun], sign: int) -> dict[str, list[PlainRun]]:
    """Return the runs of each variant, with values of which lower ones are better."""
    variants: dict[str, list[PlainRun]] = {}
    for run in runs:
        same = variants.setdefault(run.variant, [])
        if any(other.seed == run.seed for other in same):
            raise UsageError(f"two runs of variant {run.variant!r} have seed {run.seed}")
        splits = {
            split: [point._replace(value=sign * point.value) for point in points]
            for split, points in run.splits.items()
        }
        same.append(replace(run, splits=splits))
    splits = sorted({split for run in runs for split in run.splits})
    if splits and not {"valid", "test"} & set(splits):
        raise UsageError(f"no valid or test values: the splits are {', '.join(splits)}")
    return variants


def _notes(runs: Sequence[PlainRun]) -> list[str]:
    notes = []
    for split, what in (("valid", "not compared"), ("test", "validation is compared instead")):
        without = [run for run in runs if not run.points(split) and not run.diverged]
        if without and len(without) < len(runs):
            names = ", ".join(f"{run.variant} seed {run.seed}" for run in without)
            notes.append(f"no {split} values: {names}; {what}")
    if others := {split for run in runs for split in run.splits} - set(SPLITS):
        notes.append(f"unknown splits, not compared: {', '.join(map(repr, sorted(others)))}")
    return notes


def cells(figure: Figure, measure: str) -> tuple[str, str, str, str]:
    """Return label, value of the variant, value of the baseline, and difference or ratio."""
    digits = _digits(figure)
    baseline, other = (_number(value, digits) for value in figure.middle)
    if figure.ratio:
        label, infinite, digits, sign = f"{figure.label} {figure.target:.4g}", "never", 2, ""
    else:
        label = figure.label if figure.label == verdict.ERROR_RATE else f"{figure.label} {measure}"
        infinite, sign = "diverged", "+"
    difference = _number(figure.estimate, digits, sign)
    if figure.ratio and difference != "–":
        difference = f"×{difference}"
    if figure.interval:
        low, high = (_number(bound, digits, sign) for bound in figure.interval)
        difference += f" ({low}, {high})"
    return label, other.replace("–", infinite), baseline.replace("–", infinite), difference


def _digits(figure: Figure) -> int:
    """Decimals that show two digits of the uncertainty, and three or four of the values."""
    sizes = [abs(value) for value in figure.middle if math.isfinite(value)]
    if figure.ratio:
        return max(0, 2 - math.floor(math.log10(min(sizes, default=100))))
    digits = 3 - math.floor(math.log10(max(sizes, default=0) or 1))
    if figure.interval and (width := figure.interval[1] - figure.interval[0]) > 0:
        digits = max(digits - 1, 1 - math.floor(math.log10(width / 2)))
    return max(0, digits)


def _number(value: float, digits: int, sign: str = "") -> str:
    """A number with thousands separators, or in scientific form if it is very large or small."""
    if not math.isfinite(value):
        return "–"
    form = ".2e" if digits > 6 or abs(value) >= 1e7 else f",.{digits}f"
    return f"{value:{sign}{form}}".replace("-", "−")


def _truncate(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:39]}…"


def _wrapped(between: str, parts: Iterable[str]) -> list[str]:
    """Join the parts of a line; break it only between them."""
    text = between.join(part.replace(" ", "\xa0") for part in parts)
    lines = textwrap.wrap(text, COLUMNS, subsequent_indent="\xa0" * 4)
    return [line.replace("\xa0", " ") for line in lines]
