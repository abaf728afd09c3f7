"""Figures of runs: the mean over seeds with a band from the lowest to the highest seed."""

import base64
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable
from statistics import mean
from typing import TYPE_CHECKING, Any

from normrnn.config.base import Measure
from normrnn.errors import UserError
from normrnn.extras import install_command
from normrnn.reporting.groups import Group, groups
from normrnn.reporting.runs import RunsLike, load_all

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1f5fbf", "#c62828", "#a35200", "#7a3fa0", "#00695c")
"""On white, by an arm's index: the baseline, the paper's normalisation, others."""
MOST_POINTS = 400


def figure(runs: RunsLike) -> "Figure":
    """Draw validation against updates, one panel per experiment."""
    parts = groups(load_all(runs))
    figure = new_figure(figsize=(6.4 * max(1, len(parts)), 4.1), layout="constrained")
    panels = figure.subplots(1, max(1, len(parts)), squeeze=False)[0]
    for axes, group in zip(panels, parts, strict=False):
        draw(axes, group)
        axes.set_title(group.title, fontsize=10, parse_math=False)
    return figure


def draw(axes: "Axes", group: Group) -> None:
    """Draw validation: the mean over seeds, and a band from the lowest to the highest."""
    measure = group.measure
    for arm in group.arms:
        colour = COLOURS[arm.index % len(COLOURS)]
        rows = [run.split("valid", run.selected_by) for run in arm.runs]
        lines = [{row["updates"]: measure.convert(row["loss"]) for row in some} for some in rows]
        lines = [line for line in lines if line]
        common = sorted(set.intersection(*map(set, lines))) if lines else []
        common = common[:: -(-len(common) // MOST_POINTS) or 1]
        if not common:
            continue
        values = [[line[at] for line in lines] for at in common]
        mark = "o" if len(common) <= 2 else ""
        middle = list(map(mean, values))
        axes.plot(common, middle, color=colour, linewidth=1.7, label=arm.name, marker=mark)
        if len(lines) > 1:
            low, high = list(map(min, values)), list(map(max, values))
            axes.fill_between(common, low, high, color=colour, alpha=0.3, linewidth=0)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=6, integer=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    format_axes(axes, "updates", measure)


def format_axes(axes: "Axes", x: str, measure: Measure) -> None:
    """Label and scale the axes, draw a light grid, and a legend where something is drawn."""
    if measure.log and (axes.lines or axes.collections):
        from matplotlib.ticker import LogFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.7)))
    axes.set_xlabel(x)
    axes.set_ylabel(measure.axis)
    axes.grid(which="both", color="#bbbbbb", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        for text in axes.legend(fontsize=8, framealpha=0).get_texts():
            text.set_parse_math(False)


def svg_data_uri(draw: "Callable[[Axes], None]") -> str:
    """Return a picture as a data URI; empty without matplotlib."""
    if why_no_pictures():
        return ""
    figure = new_figure(figsize=(4.8, 3.2), layout="constrained")
    draw(figure.subplots())
    content = io.BytesIO()
    figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(content.getvalue()).decode()}"


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
    try:
        with contextlib.chdir(os.sep):
            importlib.import_module("matplotlib")
    except ImportError:
        raise UserError(f"matplotlib is not installed: {install_command('report')}") from None
    except OSError as error:  # of a directory that was removed
        raise UserError(f"the current directory cannot be read: {error.strerror}") from None


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
