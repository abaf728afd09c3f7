"""One layer in one direction: the cells behind one signature, on rows."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from normrnn.ops import hidden, native, recurrence
from normrnn.ops.cells import Peephole
from normrnn.ops.fold import Flat, fused
from normrnn.ops.hidden import StepNormaliser
from normrnn.ops.steps import Steps

State = tuple[Tensor, ...]
"""(h,) or, for the LSTM, (h, c)."""


class Weights(NamedTuple):
    """Of one layer and direction, under torch's names; biases and peepholes may be absent."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    bias_hn: Tensor | None = None
    peephole: Peephole = Peephole()


class _Project(torch.autograd.Function):
    """W_x x; the gradient of x comes in the layout of x, so that nobody has to turn it round."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, w_ih: Tensor) -> Tensor:
        ctx.save_for_backward(rows, w_ih)
        return torch.mm(w_ih, rows.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (d,), (rows, w_ih) = grads, ctx.saved_tensors
        d_rows = d_w = None
        if ctx.needs_input_grad[0]:
            d_rows = d.t() @ w_ih if rows.is_contiguous() else (w_ih.t() @ d).t()
        if ctx.needs_input_grad[1]:
            d_w = d @ rows
        return d_rows, d_w


def project(rows: Tensor, w_ih: Tensor) -> Tensor:
    """W_x x, feature-major: rows (N, I) -> (C, N)."""
    if torch.is_autocast_enabled(rows.device.type):
        return torch.mm(w_ih, rows.t())
    return _Project.apply(rows, w_ih)  # type: ignore


class _RowMajor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # noqa: ARG004 (nothing to keep)
        return native.transposed(rows.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        return grads[0]


def row_major(rows: Tensor) -> Tensor:
    """Contiguous rows (N, H), whether they are held row by row or feature-major."""
    if rows.is_contiguous():
        return rows
    if not rows.t().is_contiguous():
        return rows.contiguous()
    return _RowMajor.apply(rows)  # type: ignore


def add_bias(mode: str, pre: Tensor, weights: Weights) -> tuple[Tensor, Weights]:
    """W_x x + b; the part of the GRU's b_hh that is inside r ⊙ (…) stays with the recurrence."""
    if weights.b_ih is None or weights.b_hh is None:
        return pre, weights
    b_ih, b_hh, bias_hn = weights.b_ih, weights.b_hh, None
    if mode == "GRU":
        inside = 2 * weights.w_hh.shape[1]
        bias_hn = b_hh[inside:]
        b_hh = torch.cat([b_hh[:inside], torch.zeros_like(bias_hn)])
    return pre + (b_ih + b_hh).unsqueeze(1), weights._replace(bias_hn=bias_hn)


def recur(
    mode: str,
    gates: Tensor,
    state: State,
    weights: Weights,
    steps: Steps,
    *,
    reverse: bool = False,
    norm: StepNormaliser | None = None,
    donate: bool = False,
    from_zero: bool = False,
) -> tuple[Tensor, State]:
    """Gate inputs (C, N) and an initial state of (B, H) each -> rows (N, H), final state.

    ``mode`` is torch's: RNN_TANH, RNN_RELU, LSTM or GRU. With ``norm`` the sums inside the
    recurrence are normalised (the appendix), else the gate inputs are taken as they are.
    ``from_zero`` says that the initial state is known to be 0, which saves its products.
    The rows are a transposed view, which the next layer's projection takes without a copy.
    """
    start = [s.t().contiguous() for s in state]
    how = {"reverse": reverse}
    if norm is None:
        how |= {"donate": donate, "from_zero": from_zero}
    extra = (steps,) if norm is None else (steps, norm)
    cells: Any = recurrence if norm is None else hidden
    if mode == "LSTM":
        hs, cn = cells.lstm(gates, *start, weights.w_hh, *extra, peephole=weights.peephole, **how)
        return hs.t(), (steps.final(hs, reverse).t(), cn.t())
    if mode == "GRU":
        hs = cells.gru(gates, *start, weights.w_hh, weights.bias_hn, *extra, **how)
    else:
        phi = "relu" if mode == "RNN_RELU" else "tanh"
        hs = cells.rnn(gates, *start, weights.w_hh, *extra, nonlinearity=phi, **how)
    return hs.t(), (steps.final(hs, reverse).t(),)


def flat(mode: str, weights: Weights, w_ih: Tensor, b_ih: Tensor) -> Flat:
    """As torch's kernels take them, with a folded input transition."""
    b_hh = torch.zeros_like(b_ih)
    if mode == "GRU" and weights.bias_hn is not None:
        b_hh = torch.cat([b_hh[: -len(weights.bias_hn)], weights.bias_hn])
    return [w_ih, weights.w_hh, b_ih, b_hh]


def recur_fused(
    mode: str,
    rows: Tensor,
    state: State,
    weights: Flat,
    steps: Steps,
    *,
    batch_sizes: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, State]:
    """The same from rows (N, I) through torch's kernel; each sequence is flipped by itself."""
    index = steps.flip(rows.device) if reverse else None
    rows = rows if index is None else rows[index]
    x = rows if batch_sizes is not None else rows.view(len(steps), steps.batch, -1)
    start = tuple(s.unsqueeze(0).contiguous() for s in state)
    output, *final = fused(mode, x, start, weights, batch_sizes=batch_sizes, training=True)
    output = output.reshape(steps.rows, -1)
    output = output if index is None else output[index]
    return output, tuple(f.squeeze(0) for f in final)
