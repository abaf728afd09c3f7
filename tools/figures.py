"""Draw the pictures of the documentation, each for a light and a dark page.

python -m tools.figures        writes docs/pictures/*.svg from results/ and from the text below
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import geometric_mean, mean

from normrnn.reporting.runs import load
from normrnn.verdicts.rows import Point, crossing

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
EXPERIMENT, NORM, SEEDS = "ptb-small-authors", "frame", 5
TARGET = 129.23
"""The validation perplexity that every run reaches before the learning rate drops."""


@dataclass(frozen=True)
class Theme:
    """Colours of one kind of page."""

    name: str
    text: str
    faint: str
    panel: str
    colours: tuple[str, ...]


LIGHT = Theme(
    "light", "#1f2328", "#8b949e", "#eef1f4", ("#0b5fa5", "#c2570c", "#2d7d46", "#7a3e9d")
)
DARK = Theme("dark", "#e6edf3", "#7d8590", "#21262d", ("#6cb6ff", "#ffa657", "#56d364", "#d2a8ff"))


def text(x: float, y: float, words: str, colour: str, size: int = 14, **more: str) -> str:
    """Return a line of text; `anchor` and `weight` are optional."""
    anchor, weight = more.get("anchor", "start"), more.get("weight", "400")
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}" text-anchor="{anchor}"'
        f' font-weight="{weight}">{escape(words)}</text>'
    )


def box(x: float, y: float, w: float, h: float, fill: str, **more: str) -> str:
    """Return a rectangle; `stroke` is optional."""
    stroke = f' stroke="{more["stroke"]}"' if "stroke" in more else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4" fill="{fill}"{stroke}/>'


def line(points: list[tuple[float, float]], colour: str, width: float, opacity: float = 1) -> str:
    """Return a polyline."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"'
        f' opacity="{opacity:g}" stroke-linejoin="round"/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    """Return an arrow."""
    angle = math.atan2(y2 - y1, x2 - x1)
    wings = [
        (x2 - 8 * math.cos(angle + turn), y2 - 8 * math.sin(angle + turn)) for turn in (0.45, -0.45)
    ]
    return line([(x1, y1), (x2, y2)], colour, 1.5) + line(
        [wings[0], (x2, y2), wings[1]], colour, 1.5
    )


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    """Return a whole picture."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" font-family="{FONT}" role="img">'
        f"<title>{escape(title)}</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def norms(theme: Theme) -> str:
    """Which frames share a mean and a variance, for three norms."""
    lengths, cell, gap = (8, 6, 5, 3), 19, 36
    parts = []
    panels = (
        ('"sequence"', "all frames together", lambda _b, _t: 0),
        ('"frame"', "one group per step", lambda _b, t: t),
        ('"layer"', "each frame by itself", lambda b, t: 3 * b + t),
    )
    for number, (name, words, group) in enumerate(panels):
        left = 6 + number * (8 * cell + gap)
        parts += [text(left, 24, name, theme.text, 16, weight="600")]
        parts += [text(left, 45, words, theme.faint, 15)]
        for b, length in enumerate(lengths):
            for t in range(8):
                x, y = left + t * cell, 58 + b * cell
                if t < length:
                    colour = theme.colours[group(b, t) % len(theme.colours)]
                    parts.append(box(x, y, cell - 3, cell - 3, colour))
                else:
                    parts.append(box(x, y, cell - 3, cell - 3, "none", stroke=theme.faint))
        parts.append(text(left, 58 + 4 * cell + 16, "time →", theme.faint, 14))
    parts.append(
        text(6, 184, "Rows: sequences of a batch. Outlined: padding, never used.", theme.faint, 14)
    )
    return svg(560, 196, "Frames of the same colour share a mean and a variance", parts)


def validations(variant: str) -> list[list[tuple[float, float]]]:
    """Return (updates, perplexity) of every validation, for each seed of the experiment."""
    found = []
    for seed in range(1, SEEDS + 1):
        run = load(ROOT / "results" / f"{EXPERIMENT}-{variant}-{seed}")
        rows = run.split("valid", "running") or run.split("valid", None)
        found.append([(row["updates"], math.exp(row["loss"])) for row in rows])
    return found


def effect(theme: Theme) -> str:
    """Validation perplexity of Penn Treebank, five seeds, baseline and frame-wise."""
    width, height, left, right, top, bottom = 560, 320, 44, 96, 30, 50
    curves = {"baseline": validations("none"), "normalised": validations(NORM)}
    most = max(x for seeds in curves.values() for seed in seeds for x, _ in seed)
    low, high = 110.0, 230.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = left + x / most * (width - left - right)
        share = (math.log(min(y, high)) - math.log(low)) / (math.log(high) - math.log(low))
        return across, height - bottom - share * (height - top - bottom)

    parts = []
    for value in (110, 120, 130, 150, 180, 220):
        (x1, y), (x2, _) = place(0, value), place(most, value)
        parts += [line([(x1, y), (x2, y)], theme.faint, 0.5, 0.5)]
        parts += [text(left - 8, y + 4, str(value), theme.faint, 14, anchor="end")]
    for value in (0, 2000, 4000, 6000):
        x, y = place(value, low)
        parts.append(text(x, y + 18, f"{value:,}", theme.faint, 14, anchor="middle"))
    centre = (left + width - right) / 2
    parts.append(text(centre, height - 12, "updates", theme.faint, 14, anchor="middle"))
    parts.append(text(4, 16, "validation perplexity, Penn Treebank", theme.text, 15))
    ends = []
    for (name, seeds), colour in zip(curves.items(), (theme.faint, theme.colours[0]), strict=True):
        for seed in seeds:
            parts.append(line([place(x, y) for x, y in seed if y <= high], colour, 1, 0.45))
        middle = [(x, mean(seed[k][1] for seed in seeds)) for k, (x, _) in enumerate(seeds[0])]
        parts.append(line([place(x, y) for x, y in middle if y <= high], colour, 2.5))
        ends.append((place(*middle[-1])[1], name, colour))
        points = [crossing([Point(*pair) for pair in seed], TARGET) for seed in seeds]
        reached = geometric_mean(point.step for point in points if point is not None)
        x, y = place(reached, TARGET)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
        parts.append(text(x + 6, y - 8, f"{reached:,.0f}", theme.text, 14))
    ends.sort()
    for number, (y, name, colour) in enumerate(ends):
        shift = -6 if number == 0 else 14
        parts.append(text(width - right + 8, y + shift, name, colour, 14, weight="600"))
    return svg(width, height, "Validation perplexity against updates", parts)


def life(theme: Theme) -> str:
    """From torch's layer to a normalised one, and back to torch or ONNX."""
    parts = []
    steps = (
        ("nn.LSTM", ("your model", "today"), theme.faint),
        ("normrnn", ("trains with", "normalisation"), theme.colours[0]),
        ("nn.LSTM", ("same outputs,", "no extra cost"), theme.faint),
        ("ONNX", ("runs without", "normrnn"), theme.faint),
    )
    for number, (name, words, colour) in enumerate(steps):
        x = 4 + number * 153
        parts.append(box(x, 26, 96, 42, theme.panel, stroke=colour))
        parts.append(text(x + 48, 53, name, theme.text, 16, anchor="middle", weight="600"))
        parts += [
            text(x + 48, 88 + 18 * k, word, theme.faint, 14, anchor="middle")
            for k, word in enumerate(words)
        ]
        if number:
            parts.append(arrow(x - 53, 47, x - 4, 47, theme.text))
            verb = ("", "swap", "fold", "export")[number]
            parts.append(text(x - 29, 38, verb, theme.text, 14, anchor="middle"))
    return svg(564, 114, "Swap, train, fold, export", parts)


def architecture(theme: Theme) -> str:
    """Packages, each above those it imports."""
    rows = (
        ("commands", ("commands/",)),
        ("laboratory", ("experiments/", "reporting/", "recipes/", "verdicts/")),
        ("tasks", ("text/", "speech/", "arrays/")),
        ("training", ("engine/", "deploy/", "runs/", "config/")),
        ("layers", ("nn/", "norms.py")),
        ("functions", ("ops/", "ops/native/ (C)")),
    )
    parts, width = [], 460
    for number, (name, boxes) in enumerate(rows):
        y = 8 + number * 46
        parts.append(text(80, y + 24, name, theme.faint, 14, anchor="end"))
        parts.append(box(90, y, width, 38, theme.panel))
        wide = (width - 6) / len(boxes)
        for k, inside in enumerate(boxes):
            x = 93 + k * wide
            colour = theme.colours[0] if name in ("layers", "functions") else theme.faint
            parts.append(box(x + 3, y + 5, wide - 6, 28, "none", stroke=colour))
            parts.append(text(x + wide / 2, y + 24, inside, theme.text, 14, anchor="middle"))
    words = "A package imports only from its own row or from rows below."
    parts.append(text(90, 304, words, theme.faint, 14))
    return svg(560, 316, "Packages of normrnn", parts)


PICTURES: dict[str, Callable[[Theme], str]] = {
    "norms": norms,
    "effect": effect,
    "life": life,
    "architecture": architecture,
}


def texts() -> dict[str, str]:
    """Return every picture by its path in the repository."""
    return {
        f"docs/pictures/{name}-{theme.name}.svg": draw(theme)
        for name, draw in PICTURES.items()
        for theme in (LIGHT, DARK)
    }


if __name__ == "__main__":
    for path, picture in texts().items():
        (ROOT / path).write_text(picture, encoding="utf-8")
