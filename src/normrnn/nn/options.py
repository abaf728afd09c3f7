"""The arguments of the layers on top of torch's, and their checks."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from normrnn import norms

NormName = (
    Literal["sequence", "frame", "hidden", "layer", "rms", "recurrent", "whiten", "none"] | None
)
Device = torch.device | str | int | None


class _NotGiven(str):
    """The default norm, distinguished by identity from one that the user gave."""


DEFAULT_NORM: Any = _NotGiven("sequence")
"""``"sequence"`` of a layer whose ``norm`` was not given."""


@dataclass(frozen=True)
class Options:
    """The arguments of a layer that come on top of torch's, checked."""

    mode: str
    bias: bool
    norm: NormName = "sequence"
    eps: float = 1e-5
    momentum: float | None = 0.1
    affine: bool = True
    track_running_stats: bool = True
    gamma: float | None = None
    cell_norm: bool | None = None
    time_steps: int | None = None
    sync: bool = False
    process_group: Any = None
    shrinkage: float = 0.0
    weight_drop: float = 0.0
    dropout_kind: str = "element"
    zoneout: tuple[float, float] = (0.0, 0.0)
    learn_initial_state: bool = False

    def __post_init__(self) -> None:
        if self.norm in norms.names() and not norms.get(self.norm).normalises:
            object.__setattr__(self, "norm", None)
        self._check_regularisers()
        if not 0 <= self.shrinkage <= 1:
            raise ValueError(f"shrinkage must lie in [0, 1], got {self.shrinkage}")
        if not isinstance(self.bias, bool):
            raise TypeError(f"bias should be of type bool, got: {type(self.bias).__name__}")
        if not self.eps > 0:
            raise ValueError(f"eps must be positive, got {self.eps}")
        if self.momentum is not None and not 0 <= self.momentum <= 1:
            raise ValueError(f"momentum must be None or between 0 and 1, got {self.momentum}")
        row = self.row
        if row.keeps_statistics:
            self._check_statistics(row)
        if self.cell_norm and row.normalises and (row.cell_norm is None or self.mode != "LSTM"):
            able = _either(n for n in _rows() if n.cell_norm is not None)
            raise ValueError(
                f"cell_norm=True is for an LSTM with norm={able}, "
                f"got {self.mode} with norm={self.norm!r}"
            )

    def _check_regularisers(self) -> None:
        if self.dropout_kind not in ("element", "locked"):
            raise ValueError(
                f"unknown dropout_kind={self.dropout_kind!r}: choose 'element' or 'locked'"
            )
        if not 0 <= self.weight_drop < 1:
            raise ValueError(f"weight_drop must lie in [0, 1), got {self.weight_drop}")
        if not isinstance(self.zoneout, Sequence):
            raise ValueError(f"zoneout must be a pair, for h and for c, got {self.zoneout}")
        if len(self.zoneout) != 2 or not all(0 <= share < 1 for share in self.zoneout):
            raise ValueError(f"zoneout must be two numbers in [0, 1), got {self.zoneout}")
        if self.mode != "LSTM" and self.zoneout[1]:
            raise ValueError(
                f"zoneout of c is for an LSTM: use zoneout=({self.zoneout[0]}, 0.0), "
                f"got {self.zoneout} with {self.mode}"
            )

    def _check_statistics(self, row: norms.Norm) -> None:
        steps = self.time_steps
        if self.sync and not row.sync:
            able = _either(n for n in _rows() if n.sync)
            raise ValueError(f"sync=True does not work with norm={self.norm!r}: use {able}")
        if self.process_group is not None and not self.sync:
            raise ValueError("process_group= needs sync=True: pass both")
        if steps is not None and not row.takes_time_steps:
            able = _either(n for n in _rows() if n.takes_time_steps)
            raise ValueError(
                f"time_steps={steps} has no meaning with norm={self.norm!r}, whose statistics are "
                f"shared over time: use norm={able}, or leave it out"
            )
        count = isinstance(steps, int) and not isinstance(steps, bool) and steps > 0
        if steps is not None and not count:
            raise ValueError(f"time_steps must be a positive integer, got {steps!r}")

    @property
    def row(self) -> norms.Norm:
        """The row of the table."""
        if self.norm not in (None, *(row.name for row in _rows())):
            choices = ", ".join([*(repr(row.name) for row in _rows()), "None"])
            hint = f"; {norms.BATCH_HINT}" if self.norm == "batch" else ""
            raise ValueError(f"unknown norm={self.norm!r}: choose one of {choices}{hint}")
        return norms.get(self.norm)

    def normaliser(self, sizes: tuple[int, int, int], factory: dict[str, Any]) -> Any:
        """Return a normaliser for C gate inputs, H units and I inputs; None without a norm."""
        channels, hidden, inputs = sizes
        row = self.row
        if not row.normalises:
            return None
        if inputs == 1 and row.pools is None:
            warnings.warn(
                f"norm={self.norm!r} of a single input feature keeps its sign and loses its "
                "magnitude: use more features, as an embedding or a linear layer before, or "
                "norm='frame' or 'sequence'",
                stacklevel=5,
            )
        cell_norm = row.cell_norm if self.cell_norm is None else self.cell_norm
        return row.load()(
            channels,
            hidden=hidden,
            inputs=inputs,
            shrinkage=self.shrinkage,
            per_step=row.pools == "step",
            inside=row.acts == "step",
            eps=self.eps,
            momentum=self.momentum,
            affine=self.affine,
            bias=self.bias,
            track_running_stats=self.track_running_stats,
            gamma=row.gamma if self.gamma is None else self.gamma,
            cell_norm=bool(cell_norm) and self.mode == "LSTM",
            time_steps=self.time_steps,
            sync=self.sync,
            process_group=self.process_group,
            **factory,
        )


OPTION_NAMES = [field.name for field in fields(Options) if field.name != "mode"]


def _rows() -> list[norms.Norm]:
    """Return the rows of the table that normalise."""
    return [row for row in map(norms.get, norms.names()) if row.normalises]


def _either(rows: Any) -> str:
    return " or ".join(repr(row.name) for row in rows)
