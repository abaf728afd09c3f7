"""The recurrence of ready gate inputs: ``recur`` for layers, ``rnn``, ``lstm``, ``gru`` for you."""

from collections.abc import Iterable

import torch
from torch import Tensor

from normrnn.ops import kernel
from normrnn.ops.call import (
    GATES,
    Call,
    Cell,
    InputNorm,
    Inputs,
    Peephole,
    Plain,
    Plug,
    RecurrentNorm,
    Result,
    RowNorm,
    State,
    StepNorm,
)
from normrnn.ops.loop import loop
from normrnn.ops.steps import Steps

__all__ = [
    "Call",
    "Cell",
    "InputNorm",
    "Inputs",
    "Peephole",
    "Plain",
    "Plug",
    "RecurrentNorm",
    "Result",
    "RowNorm",
    "State",
    "StepNorm",
    "gru",
    "lstm",
    "recur",
    "rnn",
]


def recur(call: Call, inputs: Inputs, plug: Plug) -> Result:
    """The directions of one layer over all time steps.

    Args:
        inputs: rows with the weights of their projection, or ready gate inputs; the recurrent
            parameters of each direction; and the initial state.
        plug: how gate inputs are read and steps normalised.
    """
    _check(call, inputs)
    _check_plug(call, inputs, plug)
    found = kernel.attempt(call, inputs, plug)
    return loop(call, inputs, plug) if found is None else found


def _check(call: Call, inputs: Inputs) -> None:
    if call.mode not in GATES:
        raise ValueError(f"unknown mode {call.mode!r}: choose one of {', '.join(GATES)}")
    x, cells, state, w_ih = inputs
    D, N, B = len(call.reverse), call.steps.rows, call.steps.batch
    shown, H = cells[0].sizes
    C = GATES[call.mode] * H
    if w_ih:
        _expect("rows", x, (N, w_ih[0].shape[-1]), x)
    else:
        _expect("gate inputs", x, (N, D * C), x)
    if len(cells) != D:
        raise ValueError(f"{D} directions need {D} sets of recurrent weights, got {len(cells)}")
    for weight in w_ih:
        _expect("the input weight", weight, (C, x.shape[1]), x)
    for cell in cells:
        _expect("the recurrent weight", cell.w_hh, (C, shown), x)
        if cell.w_hr is not None:
            _expect("the projection", cell.w_hr, (shown, H), x)
        for vector in (cell.bias_hn, *cell.peephole):
            if vector is not None:
                _expect("a vector of the cell", vector, (H,), x)
    if call.resets is not None:
        _check_resets(call.resets, N, x)
    _check_zoneout(call, shown, x)
    parts = 2 if call.mode == "LSTM" else 1
    if state is not None and len(state) != parts:
        raise ValueError(f"the initial state of {call.mode} has {parts} parts, got {len(state)}")
    for part, size in zip(state or (), (shown, H), strict=False):
        _expect("an initial state", part, (D, B, size), x)


def _check_resets(resets: Tensor, rows: int, x: Tensor) -> None:
    if resets.shape != (rows,) or resets.dtype != torch.bool or resets.device != x.device:
        raise ValueError(
            f"resets should be torch.bool of shape {(rows,)} on {x.device}, one for each row, "
            f"got {resets.dtype} of shape {tuple(resets.shape)} on {resets.device}"
        )


def _check_zoneout(call: Call, shown: int, x: Tensor) -> None:
    for kept in call.zoneout:
        if kept is None:
            continue
        rows = call.steps.rows if kept.dtype == torch.bool or kept.shape[0] != 1 else 1
        like = kept if kept.dtype == torch.bool and kept.device == x.device else x
        _expect("zoneout", kept, (rows, len(call.reverse) * shown), like)
        if kept.requires_grad:
            raise ValueError("zoneout has no gradient: give it without requires_grad")


def _check_plug(call: Call, inputs: Inputs, plug: Plug) -> None:
    """Shapes alone: a normalisation may be wider than its input."""
    D, (_, H) = len(call.reverse), inputs.cells[0].sizes
    C = GATES[call.mode] * H
    sizes = {"weight": C, "bias": C, "gamma_hh": C, "weight_c": H, "bias_c": H}
    for name, size in sizes.items():
        vector = getattr(plug, name, None)
        if vector is not None:
            _expect(f"{name} of the normalisation", vector, (D * size,), vector)
    given = D * ((2 * C + plug.cell * H) if isinstance(plug, RecurrentNorm) else C)
    for value in getattr(plug, "fixed", None) or ():
        slots = 1 if value.shape[0] == 1 else call.steps.time
        _expect("given statistics", value, (slots, given), value)


def _expect(what: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{what} should have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{what} should be {like.dtype} on {like.device} as the input is, "
            f"got {tensor.dtype} on {tensor.device}"
        )


def rnn(
    gates: Tensor,
    w_hh: Tensor,
    steps: Steps,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    resets: Tensor | None = None,
    nonlinearity: str = "tanh",
) -> tuple[Tensor, Tensor]:
    """h_t = φ(gates_t + W_h h_{t−1}) of ready gate inputs, as rows.

    Args:
        gates: (N, H), the data of a PackedSequence; ``steps`` says which rows are which step.
        w_hh: (H, H).
        h0: (B, H), longest sequence first; zeros if None.
        reverse: every sequence from its own last frame to its first.
        resets: rows (N,), bool: before these frames the state starts from zero; backwards, at the
            frame before them.

    Returns:
        All states (N, H), and the last one of every sequence (B, H).

    >>> import torch
    >>> states, last = rnn(torch.randn(7, 4), torch.randn(4, 4), Steps((3, 3, 1)))
    >>> states.shape, last.shape
    (torch.Size([7, 4]), torch.Size([3, 4]))
    """
    mode = f"RNN_{nonlinearity.upper()}"
    rows, (h,) = _one(mode, gates, Cell(w_hh), steps, (h0,), (reverse, resets))
    return rows, h


def lstm(
    gates: Tensor,
    w_hh: Tensor,
    steps: Steps,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    *,
    peephole: Peephole = Peephole(),  # noqa: B008 (immutable)
    reverse: bool = False,
    resets: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The LSTM of ready gate inputs (N, 4H), gate order i, f, g, o; ``w_hh`` (4H, H).

    Returns all states (N, H), and the last h and c of every sequence, each (B, H).
    """
    cell, how = Cell(w_hh, None, peephole), (reverse, resets)
    rows, (h, c) = _one("LSTM", gates, cell, steps, (h0, c0), how)
    return rows, (h, c)


def gru(
    gates: Tensor,
    w_hh: Tensor,
    steps: Steps,
    h0: Tensor | None = None,
    *,
    bias_hn: Tensor | None = None,
    reverse: bool = False,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The GRU of ready gate inputs (N, 3H), gate order r, z, n; ``w_hh`` (3H, H).

    ``bias_hn`` (H,) is the one inside r ⊙ (W_hn h + b). Returns all states (N, H), and the last
    one of every sequence (B, H).
    """
    rows, (h,) = _one("GRU", gates, Cell(w_hh, bias_hn), steps, (h0,), (reverse, resets))
    return rows, h


def _one(
    mode: str,
    gates: Tensor,
    cell: Cell,
    steps: Steps,
    start: Iterable[Tensor | None],
    how: tuple[bool, Tensor | None],
) -> tuple[Tensor, State]:
    """One direction from a state whose missing parts are zeros."""
    zeros = gates.new_zeros(steps.batch, cell.w_hh.shape[-1])
    state = tuple((zeros if part is None else part).unsqueeze(0) for part in start)
    call = Call(mode, steps, how[:1], how[1])
    result = recur(call, Inputs(gates, [cell], state), Plain())
    return result.rows, tuple(part[0] for part in result.state)
