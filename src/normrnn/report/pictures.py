"""Curves in the paper's style: baseline blue, its normalisation red, others in other colours;
train dotted, validation solid."""

import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal

from normrnn.errors import UserError
from normrnn.extras import install_command
from normrnn.files import write_whole
from normrnn.report.curves import between_validations, gap
from normrnn.report.groups import Arm, Group, groups
from normrnn.report.runs import Row, Run, Runs, loaded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1f5fbf", "#c62828", "#a35200", "#7a3fa0", "#00695c")
"""On white, by an arm's index: the baseline, the paper's normalisation, others."""
_INK, _GRID = "#010203", "#040506"
# Colours that stand for a variable of the page until the picture is in it.
_VARIABLES = {
    _INK: "currentColor",
    _GRID: "var(--grid)",
    **{f"#0a0b{i:02x}": f"var(--arm{i})" for i in range(len(COLOURS))},
}
MOST_POINTS = 400


@dataclass(frozen=True)
class Picture:
    """One picture of a group: what it is called, what it shows in words, how it is drawn."""

    name: str
    title: str
    words: str
    draw: Callable[["Axes", Group, Sequence[str]], None]


def pictures(group: Group) -> list[Picture]:
    """All pictures for which the runs have rows."""
    if not any(run.rows for run in group.runs):
        return []
    shown = group.measure
    held_out = "dev set" if shown.held_out == "dev" else "validation"
    what = f"{shown.long[0].upper()}{shown.long[1:]}"
    words = f"Train dotted, {held_out} solid."
    found = [
        Picture(f"curves-{key}", f"{what} against {key}", words, draw)
        for key, draw in (
            ("updates", _by_updates),
            ("epochs", _by_epochs),
            ("seconds", _by_seconds),
        )
    ]
    if any("fer" in row for run in group.runs for row in run.split("valid")):
        words = f"Share of frames with a wrong state: train dotted, {held_out} solid."
        found.append(Picture("fer", "Frame error rate", words, _errors))
    if any(gap(run) for run in group.runs):
        words = f"Loss on {held_out} minus running training loss, in nats: how far a run overfits."
        found.append(Picture("gap", "Gap between train and validation", words, _gap))
    for key, title, words, draw in (
        ("grad_norm", "Gradient norm", "Mean norm of the gradient before clipping.", _gradient),
        ("lr", "Learning rate", "Learning rate against updates.", _learning_rate),
    ):
        if any(key in row for run in group.runs for row in run.split("train")):
            found.append(Picture(key.replace("_", "-"), title, words, draw))
    return found


def figure(runs: Runs) -> "Figure":
    """Curves against updates and seconds, and the gap between train and validation.

    `runs`: run directories or what `load` gave, one or several; one line of pictures per group of
    runs that can be compared.
    """
    parts = groups(loaded(runs))
    new, _ = drawing()
    figure = new(figsize=(13, max(1, len(parts)) * 4.1), layout="constrained")
    axes = figure.subplots(max(1, len(parts)), 3, squeeze=False)
    for line, group in zip(axes, parts, strict=False):
        for one, draw in zip(line, (_by_updates, _by_seconds, _gap), strict=True):
            draw(one, group, COLOURS)
            _dress(one, "#222222", "#bbbbbb")
        line[0].set_title(group.title)
        line[2].set_title("gap between train and validation")
        _legend(line[0])
    return figure


def headline(parts: Sequence[Group]) -> "Figure":
    """One panel per group, against updates."""
    new, _ = drawing()
    figure = new(figsize=(6 * len(parts), 4.1), layout="constrained")
    for axes, group in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        _by_updates(axes, group, COLOURS)
        _dress(axes, "#222222", "#bbbbbb")
        axes.set_title(group.title)
        _legend(axes)
    return figure


def save(figure: "Figure", path: Path) -> None:
    """Write a picture (PNG)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, format="png")
    write_whole(path, drawn.getbuffer())


def png(picture: Picture, group: Group, path: Path) -> None:
    """One picture as a file."""
    new, _ = drawing()
    figure = new(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    picture.draw(axes, group, COLOURS)
    _dress(axes, "#222222", "#bbbbbb")
    axes.set_title(f"{group.title}: {picture.title}", fontsize=10)
    _legend(axes, "upper left" if picture.draw is _gap else "upper right")
    save(figure, path)


def svg(picture: Picture, group: Group, prefix: str) -> str:
    """One picture of a group for the page."""

    def draw(axes: "Axes", colours: Sequence[str], ink: str, grid: str) -> None:
        picture.draw(axes, group, colours)
        _dress(axes, ink, grid)

    return themed(draw, prefix, picture.title, picture.words)


def themed(
    draw: Callable[["Axes", Sequence[str], str, str], None], prefix: str, title: str, words: str
) -> str:
    """What `draw` draws, given the colours of arms, ink and grid, as SVG for the page: no
    background, colours from the page's variables."""
    new, context = drawing()
    text = io.StringIO()
    plain = {"svg.fonttype": "none", "svg.hashsalt": prefix, "font.size": 10.5}
    with context({**plain, "font.family": "sans-serif"}):
        figure = new(figsize=(4.7, 3.1), layout="constrained")
        draw(figure.subplots(), list(_VARIABLES)[2:], _INK, _GRID)
        figure.savefig(text, format="svg", transparent=True)
    return _inline(text.getvalue(), prefix, title, words)


def _inline(text: str, prefix: str, title: str, words: str) -> str:
    """A matplotlib SVG as a part of an HTML page: named, described, ids its own."""
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    box = re.search(r'viewBox="([^"]*)"', body)
    assert box is not None
    body = body[body.index(">") + 1 :].replace("xlink:href", "href")
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'href="#', f'href="#{prefix}-', body)
    body = body.replace("url(#", f"url(#{prefix}-")
    body = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, variable)
    return (
        f'<svg viewBox="{box[1]}" role="img" aria-labelledby="{prefix}-t {prefix}-d">'
        f'<title id="{prefix}-t">{escape(title)}</title>'
        f'<desc id="{prefix}-d">{escape(words)}</desc>{body}'
    )


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return not why_no_pictures()


def why_no_pictures() -> str:
    """Why pictures cannot be drawn, with the command that helps; empty if they can."""
    try:
        drawing()
    except UserError as error:
        return f"no pictures: {error}"
    return ""


def _import_matplotlib() -> None:
    """Import it without its settings in the current directory, which may be somebody else's.

    matplotlib reads ./matplotlibrc before anything else, and no setting prevents that.
    """
    elsewhere = contextlib.chdir(os.sep)
    try:
        os.chdir(os.getcwd())  # noqa: PTH109
    except OSError:  # removed or closed to us: then nothing can be read there either
        elsewhere = contextlib.nullcontext()
    with elsewhere:
        importlib.import_module("matplotlib")


def drawing() -> tuple[Callable[..., "Figure"], Callable[..., Any]]:
    """A figure with its own canvas, so that nothing global is touched; and rc_context."""
    try:
        if "matplotlib" not in sys.modules:
            _import_matplotlib()
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"matplotlib is not installed: {install_command('report')}") from None

    def new(**options: Any) -> "Figure":
        figure = Figure(**options)
        FigureCanvasAgg(figure)
        return figure

    return new, rc_context


@dataclass(frozen=True)
class _Curve:
    """What a line shows of a run: `y` of its rows against their `x`."""

    rows: Callable[[Run], list[Row]]
    y: Callable[[Row], float]
    label: str
    x: str = "updates"
    style: str = "-"


def _plot(axes: "Axes", arm: Arm, colour: str, curve: _Curve) -> None:
    """One line; over several seeds thin lines and, where x is common to all, their mean."""
    lines = [{row[curve.x]: curve.y(row) for row in _thinned(curve.rows(run))} for run in arm.runs]
    lines = [line for line in lines if line]
    if not lines:
        return
    several = len(lines) > 1
    for line in lines:
        mark = "o" if len(line) <= 2 and not several else ""
        axes.plot(
            list(line),
            list(line.values()),
            curve.style,
            color=colour,
            marker=mark,
            markersize=3.5,
            linewidth=1.0 if several else 1.7,
            alpha=0.8 if several else 1.0,
            label="" if several else curve.label,
        )
    if several:
        common = sorted(set.intersection(*(set(line) for line in lines)))
        values = [mean(line[at] for line in lines) for at in common]
        # An empty line still names the arm in the legend.
        axes.plot(common, values, curve.style, color=colour, linewidth=1.9, label=curve.label)


def _thinned(rows: list[Row]) -> list[Row]:
    step = -(-len(rows) // MOST_POINTS)
    return rows[::step] if step > 1 else rows


def _curves(axes: "Axes", group: Group, colours: Sequence[str], x: str) -> None:
    shown = group.measure
    for arm in group.arms:
        colour = colours[arm.index % len(colours)]
        for rows, style, what in (
            (lambda run: [] if run.looks_ahead else between_validations(run), ":", "train"),
            (lambda run: run.split("valid", run.serving), "-", shown.held_out),
        ):
            at = _with_epochs(rows) if x == "at epoch" else rows
            label = f"{arm.name}, {what}"
            curve = _Curve(at, lambda row: shown.of(row["loss"]), label, x, style)
            _plot(axes, arm, colour, curve)
    _plain_log(axes, shown.log)
    axes.set_ylabel(shown.axis)


def _with_epochs(rows: Callable[[Run], list[Row]]) -> Callable[[Run], list[Row]]:
    """The rows with the epoch they stand at, in fractions."""

    def found(run: Run) -> list[Row]:
        train = run.split("train")
        if not train:
            return []
        ends = {0: 0} | {row["epoch"]: row["updates"] for row in train}
        whole = max((b - ends.get(e - 1, 0) for e, b in ends.items() if e), default=1)

        def at(row: Row) -> float:
            start = ends.get(row["epoch"] - 1, 0)
            return row["epoch"] - 1 + (row["updates"] - start) / whole

        return [{**row, "at epoch": at(row)} for row in rows(run)]

    return found


def _plain_log(axes: "Axes", log: bool) -> None:
    """A logarithmic axis with plain numbers."""
    if not log or not axes.lines:
        return
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, ScalarFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low > 300:
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low > 12 else "all"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(ScalarFormatter())


def _by_updates(axes: "Axes", group: Group, colours: Sequence[str]) -> None:
    _curves(axes, group, colours, "updates")
    axes.set_xlabel("updates")


def _by_epochs(axes: "Axes", group: Group, colours: Sequence[str]) -> None:
    _curves(axes, group, colours, "at epoch")
    axes.set_xlabel("epochs")


def _by_seconds(axes: "Axes", group: Group, colours: Sequence[str]) -> None:
    _curves(axes, group, colours, "seconds")
    axes.set_xlabel("seconds spent in updates")


def _errors(axes: "Axes", group: Group, colours: Sequence[str]) -> None:
    for arm in group.arms:
        colour = colours[arm.index % len(colours)]
        for rows, style, what in (
            (between_validations, ":", "train"),
            (lambda run: run.split("valid", run.serving), "-", "dev"),
        ):
            having = _having(rows, "fer")
            label = f"{arm.name}, {what}"
            curve = _Curve(having, lambda row: row["fer"], label, style=style)
            _plot(axes, arm, colour, curve)
    axes.set_xlabel("updates")
    axes.set_ylabel("frame error rate (FER)")


def _gap(axes: "Axes", group: Group, colours: Sequence[str]) -> None:
    for arm in group.arms:
        colour = colours[arm.index % len(colours)]
        _plot(axes, arm, colour, _Curve(gap, lambda row: row["gap"], arm.name))
    axes.axhline(0, color=_gridlike(colours), linewidth=0.8)
    axes.set_xlabel("updates")
    axes.set_ylabel("gap, nats")


def _gradient(axes: "Axes", group: Group, colours: Sequence[str]) -> None:
    for arm in group.arms:
        rows = _having(lambda run: run.split("train"), "grad_norm")
        colour = colours[arm.index % len(colours)]
        _plot(axes, arm, colour, _Curve(rows, lambda row: row["grad_norm"], arm.name))
    axes.set_xlabel("updates")
    axes.set_ylabel("gradient norm")
    axes.set_ylim(bottom=0)


def _learning_rate(axes: "Axes", group: Group, colours: Sequence[str]) -> None:
    rows = _having(lambda run: run.split("train"), "lr")
    for arm in group.arms:
        colour = colours[arm.index % len(colours)]
        for run in arm.runs[:1]:
            line = _steps(rows(run))
            # Equal rates lie upon each other: the wider line shows around the narrower.
            axes.plot(
                *line, color=colour, linewidth=max(1.2, 4.5 - 2.2 * arm.index), label=arm.name
            )
    axes.set_xlabel("updates")
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)


def _steps(rows: list[Row]) -> tuple[list[int], list[float]]:
    """A learning rate holds from the update after the last row to that of its own."""
    x, y, before = [], [], 0
    for row in rows:
        x += [before, row["updates"]]
        y += [row["lr"], row["lr"]]
        before = row["updates"]
    keep = [i for i in range(len(y)) if i in (0, len(y) - 1) or not y[i - 1] == y[i] == y[i + 1]]
    return [x[i] for i in keep], [y[i] for i in keep]


def _having(rows: Callable[[Run], list[Row]], key: str) -> Callable[[Run], list[Row]]:
    return lambda run: [row for row in rows(run) if key in row]


def _gridlike(colours: Sequence[str]) -> str:
    return "#bbbbbb" if colours is COLOURS else _GRID


def _dress(axes: "Axes", ink: str, grid: str) -> None:
    """Thin axes, a quiet grid, no frame on top and right; text is never read as mathematics."""
    axes.grid(color=grid, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(ink)
    axes.tick_params(which="both", color=ink, labelcolor=ink)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=6, integer=axes.get_xlabel() != "seconds spent in updates")
    axes.xaxis.set_major_formatter(_thousands)
    axes.xaxis.label.set_color(ink)
    axes.yaxis.label.set_color(ink)
    if not any(len(line.get_path()) for line in axes.lines):
        axes.text(0.5, 0.5, "no rows yet", color=ink, ha="center", transform=axes.transAxes)


def _thousands(value: float, _: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _legend(axes: "Axes", place: Literal["upper left", "upper right"] = "upper right") -> None:
    """Where curves that fall leave room: matplotlib's own choice can take seconds, and says so."""
    if axes.get_legend_handles_labels()[0]:
        legend = axes.legend(loc=place, fontsize=8, framealpha=0.7)
        for text in [*legend.get_texts(), axes.title]:
            text.set_parse_math(False)
