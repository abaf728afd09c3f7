"""The recurrence of ready gate inputs: ``recur`` for layers, ``rnn``, ``lstm``, ``gru`` for you."""

from collections.abc import Iterable

from torch import Tensor

from normrnn.ops import kernel
from normrnn.ops.call import (
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
from normrnn.ops.check import check
from normrnn.ops.loop import loop
from normrnn.ops.scan import run_scan
from normrnn.ops.steps import Steps, Traced

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
    check(call, inputs, plug)
    if isinstance(call.steps, Traced) and call.steps.scanned:
        return run_scan(call, inputs, plug)
    found = kernel.attempt(call, inputs, plug)
    return loop(call, inputs, plug) if found is None else found


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
