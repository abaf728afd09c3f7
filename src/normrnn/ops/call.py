"""What a recurrence is asked to compute: plain data, for the compiled kernel and the loop alike.

D is the number of directions that run in one call, C = G·H. Gate inputs are rows (N, D·C),
direction 0 first; vectors of a plug are (D·C,) in the same order.

A *plug* says how gate inputs are read and what is normalised inside a step. A new kind is one
more dataclass here and one more entry in :mod:`normrnn.ops.loop`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from normrnn.ops.normalise import Fixed
from normrnn.ops.statistics import Statistics
from normrnn.ops.steps import Steps

State = tuple[Tensor, ...]
"""(h,) or, for the LSTM, (h, c), each (D, B, H)."""
GATES = {"RNN_TANH": 1, "RNN_RELU": 1, "LSTM": 4, "GRU": 3}


class Zoneout(NamedTuple):
    """What stays of the state before a step (Krueger et al. 2017): in training masks, bool rows
    (N, D·H); or how much, in [0, 1], the same for all rows, (1, D·H), or rows; None: nothing."""

    h: Tensor | None
    c: Tensor | None = None
    """Of the LSTM."""

    def of(self, units: slice) -> "Zoneout":
        """Some columns."""
        return Zoneout(*(None if kept is None else kept[:, units] for kept in self))


NO_ZONEOUT = Zoneout(None)


@dataclass(frozen=True)
class Call:
    """What is computed."""

    mode: str
    """torch's: RNN_TANH, RNN_RELU, LSTM, GRU."""
    steps: Steps
    reverse: tuple[bool, ...] = (False,)
    """One entry per direction."""
    resets: Tensor | None = None
    """Rows (N,), bool: before these frames the state starts from zero, as if the sequence had been
    cut there; backwards, at the frame before them."""
    zoneout: Zoneout = NO_ZONEOUT


class Peephole(NamedTuple):
    """Diagonal connections from the cell to its gates, each (H,) or None (paper: W_co)."""

    i: Tensor | None = None
    f: Tensor | None = None
    o: Tensor | None = None


class Cell(NamedTuple):
    """The recurrent parameters of one direction."""

    w_hh: Tensor
    """(C, H), or (C, P) of an LSTM that projects."""
    bias_hn: Tensor | None = None
    """(H,), of the GRU: inside r ⊙ (W_hn h + b)."""
    peephole: Peephole = Peephole()
    w_hr: Tensor | None = None
    """(P, H), of an LSTM that projects: h_t = W_hr (o ⊙ tanh c_t)."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Of h and of c: H and H, or P and H."""
        shown = self.w_hh.shape[-1]
        return shown, shown if self.w_hr is None else self.w_hr.shape[-1]


class Inputs(NamedTuple):
    """What a call is given."""

    x: Tensor
    """Rows (N, I), or, without ``w_ih``, ready gate inputs (N, D·C)."""
    cells: Sequence[Cell]
    state: State | None = None
    """None: zeros."""
    w_ih: Sequence[Tensor] = ()
    """(C, I) of each direction."""


@dataclass(frozen=True)
class Plain:
    """Gate inputs as they are, plus a bias (D·C,)."""

    bias: Tensor | None = None


@dataclass(frozen=True)
class InputNorm:
    """γ (pre − mean) / √(var + ε) + β before the loop: sequence-wise, or frame-wise."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    per_step: bool
    batch: bool
    """By the batch's own statistics; else, and for lone rows, by the fixed ones."""
    fixed: Fixed | None
    """Mean and variance, each (K, D·C), K = 1 or T."""
    sync: bool = False


@dataclass(frozen=True)
class StepNorm:
    """The appendix: the sums of every step are normalised by the rows of that step.

    Of the GRU, those of r and z, then W_x x + r ⊙ (W_h h + b) of the candidate.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    batch: bool
    fixed: Fixed | None


@dataclass(frozen=True)
class RowNorm:
    """LN(pre; γ_x) + LN(W_h h; γ_h) + β over the C features of a row and direction."""

    weight: Tensor | None
    gamma_hh: Tensor | None
    bias: Tensor | None
    eps: float
    cell: bool = False
    """LN on c before tanh, with weight_c and bias_c (D·H,)."""
    weight_c: Tensor | None = None
    bias_c: Tensor | None = None


@dataclass(frozen=True)
class RecurrentNorm:
    """BN(pre; γ_x) + BN(W_h h; γ_h) + β, each by the rows of its step (Cooijmans et al. 2016).

    Statistics, given or measured, are those of pre (C), of W_h h (C) and, with ``cell``, of c (H),
    side by side, for one direction after the other.
    """

    weight: Tensor | None
    gamma_hh: Tensor | None
    bias: Tensor | None
    eps: float
    batch: bool
    fixed: Fixed | None
    cell: bool = False
    """BN on c before tanh, with weight_c and bias_c (D·H,)."""
    weight_c: Tensor | None = None
    bias_c: Tensor | None = None


Plug = Plain | InputNorm | StepNorm | RowNorm | RecurrentNorm


class Result(NamedTuple):
    rows: Tensor
    """(N, D·H)."""
    state: State
    """The last one of every sequence."""
    statistics: Statistics | None
    """Of the batch, (K, D·C), detached; None where nothing is measured."""
