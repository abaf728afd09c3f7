"""Figures of runs: the mean over seeds with a band from the lowest to the highest seed."""

import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from normrnn.errors import UserError
from normrnn.extras import install_command
from normrnn.files import write_whole
from normrnn.reporting.groups import Group, groups
from normrnn.reporting.runs import Row, Run, RunsLike, loaded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1f5fbf", "#c62828", "#a35200", "#7a3fa0", "#00695c")
"""On white, by an arm's index: the baseline, the paper's normalisation, others."""
_INK, _GRID = "#010203", "#040506"
# Placeholder colours, replaced by the page's CSS variables.
_VARIABLES = {
    _INK: "currentColor",
    _GRID: "var(--grid)",
    **{f"#0a0b{i:02x}": f"var(--arm{i})" for i in range(len(COLOURS))},
}
MOST_POINTS = 400


class Picture(NamedTuple):
    """A value of each run, drawn against updates."""

    name: str
    title: str
    split: str
    key: str
    axis: str


def validation(group: Group) -> Picture:
    """Return the picture of validation against updates."""
    axis = group.measure.axis
    return Picture("validation", "Validation against updates", "valid", "loss", axis)


def pictures(group: Group) -> list[Picture]:
    """Return the pictures that the runs have rows for, validation first."""
    found = [
        validation(group),
        Picture("train", "Training, in training mode", "train", "loss", group.measure.axis),
        Picture("grad-norm", "Gradient norm before clipping", "train", "grad_norm", "norm"),
    ]
    return [picture for picture in found if any(_rows(run, picture) for run in group.runs)]


def figure(runs: RunsLike) -> "Figure":
    """Draw validation against updates, one panel per experiment.

    `runs`: run directories or runs, one or several.
    """
    parts = groups(loaded(runs))
    figure = new_figure(figsize=(6.4 * max(1, len(parts)), 4.1), layout="constrained")
    panels = figure.subplots(1, max(1, len(parts)), squeeze=False)[0]
    for axes, group in zip(panels, parts, strict=False):
        draw(axes, group, validation(group))
        axes.set_title(group.title, fontsize=10, parse_math=False)
    return figure


def draw(
    axes: "Axes",
    group: Group,
    picture: Picture,
    colours: Sequence[str] = COLOURS,
    ink: str = "#222222",
    grid: str = "#bbbbbb",
) -> None:
    """Draw a line per arm, the mean over seeds, and a band from the lowest to the highest."""
    shown = group.measure
    for arm in group.arms:
        colour = colours[arm.index % len(colours)]
        convert = shown.convert if picture.key == "loss" else float
        lines = [
            {r["updates"]: convert(r[picture.key]) for r in _rows(run, picture)} for run in arm.runs
        ]
        lines = [line for line in lines if line]
        common = sorted(set.intersection(*map(set, lines))) if lines else []
        if not common:
            continue
        common = common[:: -(-len(common) // MOST_POINTS)]
        values = [[line[at] for line in lines] for at in common]
        mark = "o" if len(common) <= 2 else ""
        axes.plot(
            common,
            list(map(mean, values)),
            color=colour,
            linewidth=1.7,
            label=arm.name,
            marker=mark,
        )
        if len(lines) > 1:
            low, high = list(map(min, values)), list(map(max, values))
            axes.fill_between(common, low, high, color=colour, alpha=0.3, linewidth=0)
    if axes.lines:
        _log_scale(axes, shown.log and picture.key == "loss")
        for text in axes.legend(loc="upper right", fontsize=8, framealpha=0).get_texts():
            text.set_parse_math(False)
            text.set_color(ink)
    else:
        axes.text(0.5, 0.5, "no rows yet", color=ink, ha="center", transform=axes.transAxes)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=6, integer=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    dress(axes, "updates", picture.axis, ink, grid)


def _rows(run: Run, picture: Picture) -> list[Row]:
    if picture.split == "valid":
        return run.split("valid", run.serving)
    if picture.key == "loss" and run.looks_ahead:
        return []
    return [row for row in run.split(picture.split) if picture.key in row]


def dress(axes: "Axes", x: str, y: str, ink: str, grid: str) -> None:
    """Label the axes and draw a light grid."""
    axes.set_xlabel(x, color=ink)
    axes.set_ylabel(y, color=ink)
    axes.grid(color=grid, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(ink)
    axes.tick_params(which="both", color=ink, labelcolor=ink)


def _log_scale(axes: "Axes", log: bool) -> None:
    """Use a logarithmic axis with plain numbers."""
    if not log:
        return
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low < 300:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low > 12 else "all"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(ScalarFormatter())


def save(figure: "Figure", path: Path, dpi: int = 100) -> None:
    """Write a PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format="png")
    write_whole(path, drawn.getbuffer())


def svg(draw: Callable[["Axes", Sequence[str], str, str], None], prefix: str, title: str) -> str:
    """Return an inline SVG in the page's colours, with ids that start with `prefix`.

    `draw` is called with axes and the colours of arms, ink and grid.
    """
    from matplotlib import rc_context

    text = io.StringIO()
    plain: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": prefix, "font.size": 10.5}
    with rc_context({**plain, "font.family": "sans-serif"}):
        figure = new_figure(figsize=(4.8, 3.2), layout="constrained")
        draw(figure.subplots(), list(_VARIABLES)[2:], _INK, _GRID)
        figure.savefig(text, format="svg", transparent=True)
    body = text.getvalue()
    body = re.sub(r"<metadata>.*?</metadata>", "", body[body.index("<svg") :], flags=re.DOTALL)
    box = re.search(r'viewBox="([^"]*)"', body)
    assert box is not None
    body = body[body.index(">") + 1 :].replace("xlink:href", "href")
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = body.replace('href="#', f'href="#{prefix}-').replace("url(#", f"url(#{prefix}-")
    body = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, variable)
    named = f'<title id="{prefix}-t">{escape(title)}</title>'
    return f'<svg viewBox="{box[1]}" role="img" aria-labelledby="{prefix}-t">{named}{body}'


def why_no_pictures() -> str:
    """Return why pictures cannot be drawn, with an install command; empty if they can."""
    try:
        require_matplotlib()
    except UserError as error:
        return f"no pictures: {error}"
    return ""


def require_matplotlib() -> None:
    """Import matplotlib, but never a `matplotlibrc` of the current directory.

    matplotlib reads ./matplotlibrc before anything else, and no setting prevents that.
    """
    if sys.modules.get("matplotlib"):
        return
    elsewhere = contextlib.chdir(os.sep)
    try:
        os.chdir(os.getcwd())  # noqa: PTH109
    except OSError:  # removed or not readable, so it has no matplotlibrc
        elsewhere = contextlib.nullcontext()
    try:
        with elsewhere:
            importlib.import_module("matplotlib")
    except ImportError:
        raise UserError(f"matplotlib is not installed: {install_command('report')}") from None


def new_figure(**options: Any) -> "Figure":
    """Return a figure with its own canvas, without global state of matplotlib.

    Notebooks show it as a picture.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=90)
            return file.getvalue()

    figure = NotebookFigure(**options)
    FigureCanvasAgg(figure)
    return figure
