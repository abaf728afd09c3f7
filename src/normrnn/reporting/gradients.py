"""Text, table and figure of the records of `normrnn gradients`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from normrnn.reporting.pictures import COLOURS, new_figure
from normrnn.reporting.tables import DASH, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = dict[str, Any]


def sentence(layer: str, found: Record) -> str:
    """Describe how the recurrence changes a gradient."""
    factor, norms = found["growth_per_step"], found["gradient_of_the_end"]
    if factor is None:
        return f"{layer}: one time step, no gradient through time"
    start, end = _ends(layer, norms)
    verb = "grows" if factor > 1 else "shrinks"
    fate = "explodes" if factor > 1.02 else "vanishes" if factor < 0.98 else "keeps its size"
    return (
        f"{layer}: a gradient from the last step {verb} by a factor of {factor:.3f} per step on its"
        f" path back ({start:.2e} to {end:.2e} over {len(norms) - 1} steps): it {fate}"
    )


def table(records: Sequence[Record]) -> Table:
    """Return a table with a row per network and layer."""
    rows = []
    for record in records:
        for name, found in record["layers"].items():
            last, first = _ends(name, found["gradient_of_the_end"])
            factor, gamma = found["growth_per_step"], found.get("mean_gamma")
            spreads = (found.get("spread"), found.get("spread_before"))  # of older records
            rows.append(
                [
                    f"{record['label']}, {name}",
                    f"{record['loss']:.3f}",
                    DASH if factor is None else f"{factor:.3f}",
                    f"{last:.1e}",
                    f"{first:.1e}",
                    DASH if gamma is None else f"{gamma:.3f}",
                    *(f"{_spread(s[0])} … {_spread(s[-1])}" if s else DASH for s in spreads),
                ]
            )
    names = ["loss", "growth per step", "‖dL/dh‖ at the last step", "at the first", "mean γ"]
    names += ["spread of pre-activations", "before normalisation"]
    return Table(
        "A gradient of the last step's loss on its path back",
        ["network, layer", *names],
        rows,
        "Growth per step: the factor by which the norm changes with every step backwards. "
        "Spread: standard deviation at the first and at the last time step.",
    )


def _spread(value: float) -> str:
    return f"{value:.2f}" if value < 1e4 else f"{value:.1e}"


def _ends(layer: str, norms: Sequence[float]) -> tuple[float, float]:
    """Return the norms at the last and at the first step of back-propagation."""
    return (norms[0], norms[-1]) if layer.endswith("_reverse") else (norms[-1], norms[0])


def figure(records: Sequence[Record]) -> "Figure":
    """Draw the norms of dL/dh_t for the whole loss and for the last step's alone; a colour per
    record, darker in deeper layers."""
    drawn = new_figure(figsize=(10, 4.1), layout="constrained")
    panels = {
        "gradient": "‖dL/dh‖, loss of all steps",
        "gradient_of_the_end": "‖dL/dh‖, loss of the last step",
    }
    for axes, (what, title) in zip(drawn.subplots(1, 2), panels.items(), strict=True):
        for i, record in enumerate(records):
            colour = COLOURS[i % len(COLOURS)]
            depth = len(record["layers"])
            for k, (name, layer) in enumerate(record["layers"].items()):
                values = [v or None for v in layer[what]]
                shade = 0.35 + 0.65 * (k + 1) / depth
                label = f"{record['label']}, {name}"
                axes.plot(values, color=colour, alpha=shade, linewidth=1.2, label=label)
        axes.set_yscale("log")
        axes.set_xlabel("time step")
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        if what == "gradient_of_the_end":
            axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))  # beside the lines
    return drawn
