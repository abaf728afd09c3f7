"""Text and table of the records of `normrnn gradients`."""

from collections.abc import Sequence
from typing import Any

from normrnn.reporting.tables import DASH, Table

Record = dict[str, Any]


def sentence(layer: str, norms: Record) -> str:
    """Describe how the recurrence changes a gradient."""
    factor, path = norms["growth_per_step"], norms["gradient_of_the_end"]
    if factor is None:
        return f"{layer}: one time step, no gradient through time"
    start, end = _ends(layer, path)
    fate = "explodes" if factor > 1.02 else "vanishes" if factor < 0.98 else "keeps its size"
    return (
        f"{layer}: a gradient from the last step changes by a factor of {factor:.3f} per step back"
        f" ({start:.2e} to {end:.2e} over {len(path) - 1} steps): it {fate}"
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
