"""A verdict to print, to show in a notebook, or to keep as data."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from normrnn.verdicts.rows import PlainRun
from normrnn.verdicts.verdict import Figure, Settings, VariantVerdict, compare_runs

COLUMNS = 80
MOST_LINES = 3


@dataclass(frozen=True, repr=False)
class Verdict:
    """Each variant against the baseline. `print` it for the answer; `details()` has the rest."""

    baseline: str
    variants: Mapping[str, VariantVerdict]
    runs: Sequence[PlainRun]
    ranking: Sequence[tuple[str, float]] = ()
    """All variants with their quality, the best first."""
    notes: Sequence[str] = ()
    """Runs that lack values which others have."""
    measure: str = "value"
    paired: bool = False
    higher_is_better: bool = False
    title: str = ""

    @property
    def diverged(self) -> dict[str, tuple[int, int]]:
        """Variants with runs that diverged: how many of how many."""
        found: dict[str, tuple[int, int]] = {}
        for run in self.runs:
            bad, every = found.get(run.variant, (0, 0))
            found[run.variant] = bad + run.diverged, every + 1
        return {name: counts for name, counts in found.items() if counts[0]}

    def lines(self, details: bool = False) -> list[str]:
        """At most three lines per variant; with `details`, at least one per figure."""
        lines = textwrap.wrap(f"{self.title}:", COLUMNS) if self.title else []
        lines += [f"{name}: {bad} of {n} runs diverged" for name, (bad, n) in self.diverged.items()]
        for note in self.notes:
            lines += textwrap.wrap(note, COLUMNS, subsequent_indent="  ")
        texts = {_cut(name): self._texts(one, details) for name, one in self.variants.items()}
        lines += _blocks(texts, most=None if details else MOST_LINES)
        if len(self.variants) > 1 and len(self.ranking) > 2:
            pairs = (f"{_cut(name)}\xa0{_plain_number(value)}" for name, value in self.ranking)
            wrapped = textwrap.wrap(f"ranking: {', '.join(pairs)}", COLUMNS, subsequent_indent="  ")
            lines += [line.replace("\xa0", " ") for line in wrapped]
        if not self.variants:
            lines.append(f"only one variant, {self.baseline}: nothing to compare it with")
        return [line.rstrip() for line in lines]

    def _texts(self, one: VariantVerdict, details: bool) -> list[str]:
        figures = list(one.primary.values())
        figures += one.details.values() if details else ()
        if not figures:
            return ["", "no validation or test values in common"]
        seeds = "" if figures[0].answer == "one seed" else _seeds(figures[0])
        return [seeds, *(describe(figure, self.measure, details) for figure in figures)]

    def details(self) -> str:
        """All figures, and how they were computed."""
        return "\n".join([*self.lines(details=True), *textwrap.wrap(self.method, COLUMNS)])

    @property
    def method(self) -> str:
        """How the intervals were computed."""
        kind = "paired t intervals" if self.paired else "Welch's t intervals"
        count = len(self.variants)
        several = f"; simultaneous over {count} variants for test and speed" if count > 1 else ""
        early = "; early: before the learning rate drops" if self._has_early_speed else ""
        return f"95 % {kind}{several}. Training values in eval mode{early}."

    @property
    def _has_early_speed(self) -> bool:
        return any("speed_before_drop" in one.details for one in self.variants.values())

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        answers = ", ".join(
            f"{name}: {one.quality.answer if one.quality else 'no values'}"
            for name, one in self.variants.items()
        )
        return f"<Verdict against {self.baseline!r}: {answers}>"

    def _repr_html_(self) -> str:
        rows = []
        for name, one in self.variants.items():
            for figure in one.primary.values():
                rows.append([name, *cells(figure, self.measure), figure.answer, _seeds(figure)])
                name = ""
        head = ["variant", "figure", "value", self.baseline, "difference or ratio", "answer", ""]
        return html_table(head, rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "baseline": self.baseline,
            "measure": self.measure,
            "paired": self.paired,
            "higher_is_better": self.higher_is_better,
            "notes": list(self.notes),
            "diverged": {name: list(counts) for name, counts in self.diverged.items()},
            "ranking": [[name, value] for name, value in self.ranking],
            "variants": {name: one.to_dict() for name, one in self.variants.items()},
        }


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for notebooks."""
    lines = [("th", head), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{escape(c)}</{tag}>" for c in line) for tag, line in lines)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def verdict_of(
    runs: Sequence[PlainRun],
    baseline: str | None = None,
    settings: Settings | None = None,
    measure: str = "value",
) -> Verdict:
    """Compare all variants of these runs with the baseline."""
    settings = settings or Settings()
    name, variants, ranking, notes = compare_runs(runs, baseline, settings)
    return Verdict(
        name,
        variants,
        runs,
        ranking,
        notes,
        measure,
        settings.paired,
        settings.higher_is_better,
    )


def describe(figure: Figure, measure: str, details: bool = False) -> str:
    """A figure as one line: values, difference or ratio, interval, answer.

    With `details`, also the half-width of the interval.
    """
    label, other, baseline, difference = cells(figure, measure)
    colon = ":" if figure.target is not None else ""
    if details and figure.half_width is not None:
        sign = "×/÷" if figure.ratio else "±"
        difference += f" {sign}{_number(figure.half_width, 2 if figure.ratio else _digits(figure))}"
    text = f"{label}{colon} {other} vs {baseline}   {difference}   {figure.answer}"
    if len(text) > COLUMNS - 2:  # two spaces before it, in the narrowest layout
        return text.replace(" to validation", " to").replace("   ", "  ")
    return text


def cells(figure: Figure, measure: str) -> tuple[str, str, str, str]:
    """Return label, value of the variant, value of the baseline, and difference or ratio."""
    digits = _steps_digits(figure) if figure.ratio else _digits(figure)
    baseline, other = (_number(value, digits) for value in figure.middle)
    if figure.ratio:
        target = "" if figure.target is None else f" {_plain_number(figure.target)}"
        difference = _number(figure.estimate, 2)
        difference = difference if difference == "–" else f"×{difference}"
        bounds = figure.interval and [_number(v, 2) for v in figure.interval]
        baseline, other = (v.replace("–", "never") for v in (baseline, other))
        label = f"{figure.label}{target}"
    else:
        difference = _number(figure.estimate, digits, signed=True)
        bounds = figure.interval and [_number(v, digits, signed=True) for v in figure.interval]
        baseline, other = (v.replace("–", "diverged") for v in (baseline, other))
        label = f"{figure.label} {measure}"
    return label, other, baseline, difference + (f" ({', '.join(bounds)})" if bounds else "")


def _steps_digits(figure: Figure) -> int:
    """Decimals of updates or seconds: none from 100 on."""
    smallest = min((abs(v) for v in figure.middle if math.isfinite(v)), default=100)
    return 0 if smallest >= 100 else 1 if smallest >= 10 else 2


def _digits(figure: Figure) -> int:
    """Decimals that show two digits of the uncertainty, and three or four of the values."""
    size = max((abs(v) for v in figure.middle if math.isfinite(v)), default=1.0) or 1.0
    digits = 3 - math.floor(math.log10(size))
    half = figure.half_width or 0.0
    if half > 0:
        digits = max(digits - 1, 1 - math.floor(math.log10(half)))
    return max(0, digits)


def _number(value: float, digits: int, signed: bool = False) -> str:
    """A number with thousands separators, or in scientific form if it is very large or small."""
    if not math.isfinite(value):
        return "–"
    form = f"{'+' if signed else ''}{',.' + str(digits) + 'f'}"
    if digits > 6 or abs(value) >= 1e7:
        form = f"{'+' if signed else ''}.2e"
    return f"{value:{form}}".replace("-", "−")


def _plain_number(value: float) -> str:
    return f"{value:.4g}"


def _cut(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:39]}…"


def _seeds(figure: Figure) -> str:
    one = len(figure.baseline), len(figure.other)
    return (
        f"{one[1]} seed{'s' * (one[1] > 1)}" if one[0] == one[1] else f"{one[1]} vs {one[0]} seeds"
    )


def _blocks(blocks: Mapping[str, Sequence[str]], most: int | None) -> list[str]:
    """Lines of all variants, at most `most` each, in the first layout that fits.

    The texts of a variant start with the number of its seeds.
    """
    indent = max(map(len, blocks), default=0) + 3
    columns, inline, headed = [], [], []
    for name, texts in blocks.items():
        seeds, first, *rest = texts[: most and most + 1]
        columns += [f"{name:<{indent}}{first}   {seeds}", *(" " * indent + text for text in rest)]
        seeds, first, *rest = (text.replace("   ", "  ") for text in texts[: most and most + 1])
        inline += [f"{name}: {first}  {seeds}", *(f"  {text}" for text in rest)]
        headed += [f"{name}, {seeds}:" if seeds else f"{name}:"]
        for text in (first, *rest)[: most and most - 1]:
            headed += _wrapped(f"  {text}")
    fitting = (x for x in (columns, inline) if all(len(line.rstrip()) <= COLUMNS for line in x))
    return next(fitting, headed)


def _wrapped(line: str) -> list[str]:
    """The line, or its parts on several lines if it is too wide even so."""
    if len(line) <= COLUMNS:
        return [line]
    start = line[: len(line) - len(line.lstrip())]
    parts = line.strip().split("  ")
    lines = [start + parts[0]]
    for part in parts[1:]:
        if len(f"{lines[-1]}  {part}") <= COLUMNS:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"{start}  {part}")
    return lines
