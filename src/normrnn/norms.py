"""The table of normalisations: one row each, without torch.

Command line, recipes, models, evaluation and reports ask a row what they need to know; nothing
else compares a normalisation by its name. "none" is the baseline, ``norm=None`` of the layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

BASELINE = "none"
BATCH_HINT = (
    "batch normalisation over all frames of the batch is 'sequence', over the frames of each time"
    " step 'frame'"
)


@dataclass(frozen=True, kw_only=True)
class Norm:
    """What the rest of the program needs to know of a normalisation."""

    name: str
    """As on the command line, in `config.json` and as ``norm=`` of the layers."""
    words: str
    """An arm in words, for reports."""
    acts: Literal["input", "step"] | None
    """On the input transition W_x x before the recurrence, or inside every step; None: not."""
    pools: Literal["batch", "step"] | None
    """The rows that share a mean and a variance: all of a batch, or those of one time step; more
    than one is needed. None: every row stands for itself."""
    looks_ahead: bool = False
    """Whether batch statistics use later frames: they cannot score the prediction of those."""
    sync: bool = False
    """Whether statistics can be pooled over processes."""
    more_rows_than_features: bool = False
    """Whether batch statistics need that, unless they are shrunk."""
    unfoldable: str = ""
    """Why no plain layer has the same eval output; empty if one has (statistics shared over time
    provided)."""
    gamma: float = 1.0
    """Initial γ unless one is given."""
    cell_norm: bool | None = None
    """Whether the LSTM's cell is normalised too unless the user says; None: it cannot be."""
    implementation: str = ""
    """``module:class`` of the normaliser that the layers build, imported when first needed."""

    @property
    def normalises(self) -> bool:
        """False for the baseline."""
        return self.acts is not None

    @property
    def keeps_statistics(self) -> bool:
        """Whether eval mode depends on statistics of training: running, recalibrated, batch."""
        return self.pools is not None

    @property
    def takes_time_steps(self) -> bool:
        """Whether test statistics can be kept per time step."""
        return self.pools == "step"

    def load(self) -> Any:
        """The class that implements it."""
        module, _, name = self.implementation.partition(":")
        return getattr(import_module(module), name)


_TABLE: dict[str, Norm] = {}


def register(norm: Norm) -> Norm:
    """Add a row; a name that is taken is an error."""
    if norm.name in _TABLE:
        raise ValueError(f"there is a normalisation {norm.name!r} already")
    _TABLE[norm.name] = norm
    return norm


def get(name: str | None) -> Norm:
    """Return the row of a name, or of the layers' None; ValueError with the choices for others."""
    row = _TABLE.get(BASELINE if name is None else name)
    if row is None:
        hint = f"; {BATCH_HINT}" if name == "batch" else ""
        raise ValueError(f"unknown normalisation {name!r}: choose one of {', '.join(_TABLE)}{hint}")
    return row


def get_or_unknown(name: str) -> Norm:
    """The row of a name, or a placeholder for a norm that is not registered."""
    return _TABLE.get(name) or Norm(name=name, words=name, acts="step", pools=None)


def names() -> tuple[str, ...]:
    """Return all names, the baseline first."""
    return tuple(_TABLE)


def statistics_shown(settings: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Return the kind of statistics of a row of metrics; a dash for a network that keeps none."""
    norm = _TABLE.get(settings["norm"])
    return "–" if norm is not None and not norm.keeps_statistics else row["statistics"]


_BATCHNORM = "normrnn.nn.batchnorm:Normaliser"
_TRANSITIONS = "normrnn.nn.transitions:"
for row in (
    Norm(name=BASELINE, words="baseline", acts=None, pools=None),
    Norm(
        name="sequence", words="sequence-wise normalised network", acts="input", pools="batch",
        looks_ahead=True, sync=True, implementation=_BATCHNORM,
    ),
    Norm(
        name="frame", words="frame-wise normalised network", acts="input", pools="step",
        sync=True, implementation=_BATCHNORM,
    ),
    Norm(
        name="hidden", words="network normalised inside the recurrence", acts="step", pools="step",
        implementation=_BATCHNORM,
    ),
    Norm(
        name="layer", words="layer-normalised network", acts="step", pools=None, cell_norm=False,
        unfoldable="normalises every row by its own mean and variance",
        implementation=f"{_TRANSITIONS}LayerNormaliser",
    ),
    Norm(
        name="rms", words="RMS-normalised network", acts="step", pools=None, cell_norm=False,
        unfoldable="normalises every row by its own root mean square",
        implementation=f"{_TRANSITIONS}RMSNormaliser",
    ),
    Norm(
        name="recurrent", words="network with both transitions normalised",
        acts="step", pools="step", gamma=0.1, cell_norm=True,
        implementation=f"{_TRANSITIONS}RecurrentNormaliser",
    ),
    Norm(
        name="whiten", words="network with whitened inputs", acts="input", pools="batch",
        looks_ahead=True, more_rows_than_features=True, implementation="normrnn.nn.whiten:Whitener",
    ),
):  # fmt: skip
    register(row)
