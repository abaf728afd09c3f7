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
    measure: str = "value"
    paired: bool = False
    higher_is_better: bool = False
    title: str = ""

    @property
    def ranking(self) -> list[tuple[str, float]]:
        """All variants with their quality, the best first; those without one are left out."""
        found: dict[str, float] = {}
        for name, one in self.variants.items():
            if one.quality is not None:
                found[self.baseline], found[name] = one.quality.middle
        order = sorted(found.items(), key=lambda item: item[1], reverse=self.higher_is_better)
        return [(name, value) for name, value in order if math.isfinite(value)]

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
        texts = {name: self._texts(one, details) for name, one in self.variants.items()}
        lines += _blocks(texts, most=None if details else MOST_LINES)
        if len(self.variants) > 1 and len(self.ranking) > 2:
            values = ", ".join(f"{name} {_plain_number(value)}" for name, value in self.ranking)
            lines += textwrap.wrap(f"ranking: {values}", COLUMNS, subsequent_indent="  ")
        if not self.variants:
            lines.append(f"only one variant, {self.baseline}: nothing to compare it with")
        return [line.rstrip() for line in lines]

    def _texts(self, one: VariantVerdict, details: bool) -> list[str]:
        figures = [f for f in (one.quality, one.speed, one.seconds) if f is not None]
        figures += one.details.values() if details else ()
        if not figures:
            return ["", "no validation or test values in common"]
        seeds = "" if figures[0].answer == "one seed" else _seeds(figures[0])
        return [seeds, *(describe(figure, self.measure) for figure in figures)]

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
            for figure in (one.quality, one.speed, one.seconds):
                if figure is not None:
                    row = [name, *cells(figure, self.measure), figure.answer, _seeds(figure)]
                    rows.append("".join(f"<td>{escape(cell)}</td>" for cell in row))
                    name = ""
        head = "".join(
            f"<th>{text}</th>"
            for text in (
                "variant",
                "figure",
                "value",
                escape(self.baseline),
                "difference or ratio",
                "answer",
                "",
            )
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "baseline": self.baseline,
            "measure": self.measure,
            "paired": self.paired,
            "higher_is_better": self.higher_is_better,
            "diverged": {name: list(counts) for name, counts in self.diverged.items()},
            "ranking": [[name, value] for name, value in self.ranking],
            "variants": {
                name: {
                    **{
                        key: None if figure is None else figure.to_dict()
                        for key, figure in (
                            ("quality", one.quality),
                            ("speed", one.speed),
                            ("seconds", one.seconds),
                        )
                    },
                    "details": {key: figure.to_dict() for key, figure in one.details.items()},
                }
                for name, one in self.variants.items()
            },
        }


def verdict_of(
    runs: Sequence[PlainRun],
    baseline: str | None = None,
    settings: Settings | None = None,
    measure: str = "value",
    title: str = "",
) -> Verdict:
    """Compare all variants of these runs with the baseline."""
    settings = settings or Settings()
    name, found = compare_runs(runs, baseline, settings)
    return Verdict(
        name,
        {one.name: one for one in found},
        runs,
        measure,
        settings.paired,
        settings.higher_is_better,
        title,
    )


def describe(figure: Figure, measure: str) -> str:
    """A figure as one line: values, difference or ratio, interval, answer."""
    label, other, baseline, difference = cells(figure, measure)
    colon = ":" if figure.target is not None else ""
    return f"{label}{colon} {other} vs {baseline}   {difference}   {figure.answer}"


def cells(figure: Figure, measure: str) -> tuple[str, str, str, str]:
    """Return label, value of the variant, value of the baseline, and difference or ratio."""
    digits = 0 if figure.ratio else _digits(figure)
    baseline, other = (_number(value, digits) for value in figure.middle)
    if figure.ratio:
        target = "" if figure.target is None else f" {_plain_number(figure.target)}"
        difference = "–" if math.isinf(figure.estimate) else f"×{_number(figure.estimate, 2)}"
        bounds = figure.interval and [_number(v, 2) for v in figure.interval]
        label = f"{figure.label}{target}"
    else:
        difference = _signed(figure.estimate, digits)
        bounds = figure.interval and [_signed(v, digits) for v in figure.interval]
        baseline, other = (v.replace("never", "diverged") for v in (baseline, other))
        label = f"{figure.label} {measure}"
    return label, other, baseline, difference + (f" ({', '.join(bounds)})" if bounds else "")


def _digits(figure: Figure) -> int:
    """Decimals that show two digits of the uncertainty, and three or four of the values."""
    size = max(abs(v) for v in (*figure.middle, 1e-6) if math.isfinite(v))
    digits = 3 - math.floor(math.log10(size))
    if figure.interval is not None and (half := (figure.interval[1] - figure.interval[0]) / 2):
        digits = max(digits - 1, 1 - math.floor(math.log10(half)))
    return min(6, max(0, digits))


def _number(value: float, digits: int) -> str:
    return "never" if math.isinf(value) else f"{value:,.{digits}f}".replace("-", "−")


def _signed(value: float, digits: int) -> str:
    return "–" if math.isinf(value) else f"{value:+,.{digits}f}".replace("-", "−")


def _plain_number(value: float) -> str:
    return f"{value:.4g}"


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
