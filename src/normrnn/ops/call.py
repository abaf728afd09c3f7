"""The description of a call: a static :class:`Spec`, the layout of its rows, and its tensors.

The loop, the compiled kernels, the operators and their derivatives all take these three. D is the
number of directions that run in one call. Gate inputs are rows (N, D·C), direction 0 first;
vectors of a normalisation are (D·C,) in the same order.

A new cell is a row of :data:`CELLS` and a function in :mod:`normrnn.ops.loop`; a new
normalisation is a name in :data:`NORMS` and a class there.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from normrnn.ops.layout import Steps
from normrnn.ops.statistics import SINGLE_ROW, Statistics

State = tuple[Tensor, ...]
"""(h,) or, for the LSTM, (h, c), each (D, B, H)."""


class CellType(NamedTuple):
    gates: int
    states: int
    """Tensors of a state: h, and c of the LSTM."""


CELLS = {
    "RNN_TANH": CellType(1, 1),
    "RNN_RELU": CellType(1, 1),
    "LSTM": CellType(4, 2),
    "GRU": CellType(3, 1),
    "LIGRU": CellType(2, 1),
}
"""Cells, by torch's names where it has them."""

NORMS = {
    "none": {"bias"},
    "input": {"weight", "bias", "mean", "var"},
    "step": {"weight", "bias", "mean", "var"},
    "row": {"weight", "bias", "gamma_hh", "weight_c", "bias_c"},
    "recurrent": {"weight", "bias", "gamma_hh", "weight_c", "bias_c", "mean", "var"},
    "rms": {"weight", "bias", "gamma_hh", "weight_c", "bias_c"},
}
"""Kinds of normalisation and the tensors that each takes:

- none: W_x x + W_h h + β
- input: γ (W_x x − mean) / √(var + ε) + β + W_h h, over all rows or, ``per_step``, each step's
- step: the sums W_x x + W_h h of a step normalised over its rows (the paper's appendix)
- row: LN(W_x x; γ_x) + LN(W_h h; γ_h) + β over the C features of a row and direction
- recurrent: BN(W_x x; γ_x) + BN(W_h h; γ_h) + β, each over the rows of a step. Statistics are
  those of W_x x (C), W_h h (C) and, with ``cell``, c (H), one direction after the other.
- rms: as row, each row divided by its root mean square, √(mean of squares + ε)
"""


class Norm(NamedTuple):
    """A normalisation: the static part first, then its tensors."""

    kind: str = "none"
    eps: float = 0.0
    per_step: bool = False
    """Statistics over the rows of each time step, not over all rows."""
    batch: bool = False
    """Normalise with the batch's own statistics; otherwise, and where a group of rows has no
    variance, with the given ones."""
    cell: bool = False
    """Normalise the LSTM's c before tanh too."""
    weight: Tensor | None = None
    bias: Tensor | None = None
    gamma_hh: Tensor | None = None
    weight_c: Tensor | None = None
    bias_c: Tensor | None = None
    mean: Tensor | None = None
    """Given statistics (K, D·C), K = 1 or T."""
    var: Tensor | None = None

    STATIC = 5
    """How many of the fields are static."""


class Weights(NamedTuple):
    """The weights of one layer and direction."""

    w_ih: Tensor | None
    """(C, I); None: gate inputs are ready."""
    w_hh: Tensor
    """(C, H), or (C, P) of an LSTM with a projection."""
    bias_hn: Tensor | None = None
    """(H,), GRU: inside r ⊙ (W_hn h + b)."""
    peephole_i: Tensor | None = None
    """(H,), LSTM: diagonal connections from the cell to its gates (paper: W_co)."""
    peephole_f: Tensor | None = None
    peephole_o: Tensor | None = None
    w_hr: Tensor | None = None
    """(P, H): h_t = W_hr (o ⊙ tanh c_t)."""
    bias: Tensor | None = None
    """(C,); part of the normalisation in a call."""

    IN_CALL = 7
    """How many of the fields a call has per direction."""

    @property
    def state_sizes(self) -> tuple[int, int]:
        """Features of h and of c: H and H, or P and H."""
        shown = self.w_hh.shape[-1]
        return shown, shown if self.w_hr is None else self.w_hr.shape[-1]


class Tensors(NamedTuple):
    """All tensors of a call, in the order of `native/arguments.h`."""

    x: Tensor
    """Rows (N, I), or without ``w_ih`` ready gate inputs (N, D·C)."""
    h0: Tensor | None
    """Initial states (D, B, H); None: zeros."""
    c0: Tensor | None
    reset_h: Tensor | None
    """The state that a reset starts from, as h0 and c0."""
    reset_c: Tensor | None
    resets: Tensor | None
    """Rows (N,), bool: before these frames the state restarts, as if the sequence was cut there;
    backward, at the frame before them."""
    zoneout_h: Tensor | None
    """What stays of the state before a step (Krueger et al. 2017): masks, bool rows (N, D·H), or
    shares in [0, 1], the same for all rows, (1, D·H), or rows."""
    zoneout_c: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    gamma_hh: Tensor | None
    weight_c: Tensor | None
    bias_c: Tensor | None
    mean: Tensor | None
    var: Tensor | None
    w_ih: Tensor | None
    w_hh: Tensor
    bias_hn: Tensor | None = None
    peephole_i: Tensor | None = None
    peephole_f: Tensor | None = None
    peephole_o: Tensor | None = None
    w_hr: Tensor | None = None
    w_ih_1: Tensor | None = None
    """Those of the second direction."""
    w_hh_1: Tensor | None = None
    bias_hn_1: Tensor | None = None
    peephole_i_1: Tensor | None = None
    peephole_f_1: Tensor | None = None
    peephole_o_1: Tensor | None = None
    w_hr_1: Tensor | None = None

    RESETS, ZONEOUT, NORM, FIRST, SECOND = 5, 6, 8, 15, 22
    """Where the resets, the zoneout, the norm's tensors and those of each direction begin."""

    def weights(self, direction: int) -> Weights:
        first = (self.FIRST, self.SECOND)[direction]
        return Weights(*self[first : first + Weights.IN_CALL])  # type: ignore[arg-type]

    @property
    def norm(self) -> tuple[Tensor | None, ...]:
        return self[self.NORM : self.FIRST]  # type: ignore[return-value]


COUNT = len(Tensors._fields)


class Spec(NamedTuple):
    """The static part of a call; the last fields are those of :class:`Norm`."""

    mode: str
    reverse: tuple[bool, ...]
    """One entry per direction."""
    kind: str = "none"
    eps: float = 0.0
    per_step: bool = False
    batch: bool = False
    cell: bool = False

    @property
    def states(self) -> int:
        return CELLS[self.mode].states

    @property
    def tests_constant_steps(self) -> bool:
        """Whether steps of W_x x whose rows are all equal use the given statistics."""
        return self.batch and self.per_step and self.kind in ("input", "recurrent")

    def statistics_shape(self, time: int, hidden: int) -> tuple[int, int, int]:
        """Shape of the batch's mean and variance, (2, K, D·channels)."""
        channels = CELLS[self.mode].gates * hidden
        if self.kind == "recurrent":
            channels = 2 * channels + hidden * self.cell
        return 2, time if self.per_step else 1, len(self.reverse) * channels


def describe_call(
    mode: str,
    reverse: tuple[bool, ...],
    x: Tensor,
    weights: list[Weights],
    norm: Norm,
    state: State | None = None,
    resets: Tensor | None = None,
    zoneout: tuple[Tensor | None, Tensor | None] = (None, None),
    reset_to: State | None = None,
) -> tuple[Spec, Tensors]:
    """Return the static part and the tensors of a call.

    Args:
        weights: of each direction.
        norm: of all directions together.
    """
    flat = [x, *_pair(state), *_pair(reset_to), resets, *zoneout, *norm[Norm.STATIC :]]
    for direction in weights:
        flat += direction[: Weights.IN_CALL]
    return Spec(mode, reverse, *norm[: Norm.STATIC]), Tensors(*flat)  # type: ignore[arg-type]


def _pair(state: State | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if state is None else state if len(state) == 2 else (state[0], None)


class Result(NamedTuple):
    rows: Tensor
    """(N, D·H)."""
    state: State
    """The last one of every sequence."""
    statistics: Statistics | None
    """Statistics of the batch (K, D·channels), detached; None if none are used."""


_FLOATS = {name for name in Tensors._fields if name not in ("resets", "zoneout_h", "zoneout_c")}
_WIDE = {"weight", "bias", "gamma_hh", "weight_c", "bias_c", "mean", "var"}
"""Tensors of a normalisation, which may have a wider type than the input."""


def check(spec: Spec, steps: Steps, tensors: Tensors) -> None:
    """Check numbers, shapes, types and devices of a call; ValueError if one does not fit.

    The compiled kernels read memory by these sizes, so every accepted call must be safe.
    """
    _check_spec(spec)
    x, D = tensors.x, len(spec.reverse)
    both: Any = (tensors.w_ih, tensors.w_hh, tensors.w_hr)
    if D == 2:
        second = tensors.w_ih_1, tensors.w_hh_1, tensors.w_hr_1
        for one, other in zip(both, second, strict=True):
            if (one is None) != (other is None):
                raise ValueError("weights should be given for all directions or for none")
        both += second
    if x is None or tensors.w_hh is None:
        raise ValueError("the input and the recurrent weights cannot be None")
    for matrix in (x, *both):
        if matrix is not None and (matrix.dim() != 2 or not matrix.is_floating_point()):
            raise ValueError(
                f"the input and the weights should be matrices of real numbers, got {matrix.dtype} "
                f"of shape {tuple(matrix.shape)}"
            )
    if spec.mode == "LSTM":
        for pair in ("h0", "c0"), ("reset_h", "reset_c"):
            if (getattr(tensors, pair[0]) is None) != (getattr(tensors, pair[1]) is None):
                raise ValueError(f"{pair[0]} and {pair[1]} should be given together")
    if (tensors.mean is None) != (tensors.var is None):
        raise ValueError("mean and var should be given together")
    shapes, dtype, device = _shapes(spec, steps, tensors), x.dtype, x.device
    for name, tensor in zip(Tensors._fields, tensors, strict=True):
        if tensor is None:
            continue
        shape = shapes.get(name)
        if shape is None:
            raise ValueError(f"{spec.mode} with the norm {spec.kind!r} takes no {name}")
        if tensor.shape != shape:
            raise ValueError(f"{name} should have shape {shape}, got {tuple(tensor.shape)}")
        wanted = dtype if name in _FLOATS else torch.bool
        is_wide = name in _WIDE and tensor.is_floating_point()
        is_share = name.startswith("zoneout") and tensor.dtype == dtype
        if (tensor.dtype != wanted and not (is_wide or is_share)) or tensor.device != device:
            raise ValueError(
                f"{name} should be {wanted} of shape {tuple(shape)} on {device} as the input is, "
                f"got {tensor.dtype} on {tensor.device}"
            )
        if name.startswith("zoneout") and tensor.requires_grad:
            raise ValueError("zoneout has no gradient: give it without requires_grad")


def _check_spec(spec: Spec) -> None:
    mode, reverse, kind, eps, per_step, _, cell = spec
    if mode not in CELLS:
        raise ValueError(f"unknown mode {mode!r}: choose one of {', '.join(CELLS)}")
    if kind not in NORMS:
        raise ValueError(f"unknown norm {kind!r}: choose one of {', '.join(NORMS)}")
    if len(reverse) not in (1, 2):
        raise ValueError(f"a layer has one or two directions, got reverse={reverse}")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps should be finite and not negative, got {eps}")
    if cell and (mode != "LSTM" or "weight_c" not in NORMS[kind]):
        raise ValueError(f"{mode} with the norm {kind!r} has no cell to normalise")
    if kind != "input" and per_step != (kind in ("step", "recurrent")):
        raise ValueError(f"per_step={per_step} does not go with the norm {kind!r}")
    if spec.batch and "mean" not in NORMS[kind]:
        raise ValueError(f"the norm {kind!r} has no batch statistics")


def _shapes(spec: Spec, steps: Steps, tensors: Tensors) -> dict[str, tuple[Any, ...]]:
    """Return the shape of every tensor that such a call may have."""
    D, N, B = len(spec.reverse), steps.rows, steps.batch
    C, shown = tensors.w_hh.shape
    H = shown if tensors.w_hr is None else tensors.w_hr.shape[1]
    if CELLS[spec.mode].gates * H != C:
        raise ValueError(
            f"w_hh should have {CELLS[spec.mode].gates} × {H} rows for {spec.mode}, got {C}"
        )
    width = D * C if tensors.w_ih is None else tensors.w_ih.shape[1]
    shapes: dict[str, tuple[Any, ...]] = {"x": (N, width), "resets": (N,)}
    shapes["h0"] = shapes["reset_h"] = D, B, shown
    if spec.mode == "LSTM":
        shapes["c0"] = shapes["reset_c"] = D, B, H
    for name, size in (("zoneout_h", shown), ("zoneout_c", H)):
        kept: Tensor | None = getattr(tensors, name)
        if kept is not None and (name == "zoneout_h" or spec.mode == "LSTM"):
            is_shared = kept.dtype != torch.bool and kept.shape[:1] == (1,)
            shapes[name] = 1 if is_shared else N, D * size
    widths = {"weight": C, "bias": C, "gamma_hh": C, "weight_c": H, "bias_c": H}
    for name in NORMS[spec.kind]:
        if name in widths:
            shapes[name] = (D * widths[name],)
    if tensors.mean is not None and "mean" in NORMS[spec.kind]:
        slots = 1 if tensors.mean.shape[:1] == (1,) else steps.time
        shapes["mean"] = shapes["var"] = slots, spec.statistics_shape(1, H)[2]
    per_direction: dict[str, tuple[Any, ...]] = {"w_ih": (C, width), "w_hh": (C, shown)}
    if spec.mode == "GRU":
        per_direction["bias_hn"] = (H,)
    if spec.mode == "LSTM":
        per_direction |= {
            "peephole_i": (H,),
            "peephole_f": (H,),
            "peephole_o": (H,),
            "w_hr": (shown, H),
        }
    shapes |= per_direction
    if D == 2:
        shapes |= {f"{name}_1": shape for name, shape in per_direction.items()}
    return shapes


def check_given(spec: Spec, steps: Steps, tensors: Tensors) -> None:
    """ValueError where given statistics are needed, by a group of one row too, and missing."""
    if tensors.mean is not None or "mean" not in NORMS[spec.kind]:
        return
    if not spec.batch or steps.has_single_row(spec.per_step):
        raise ValueError(SINGLE_ROW)
