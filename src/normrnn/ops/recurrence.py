"""The recurrence of each cell as one differentiable function of ready gate inputs.

Everything is feature-major: gate inputs (C, N), states (H, N), initial states (H, B). The
recurrent weight is kept transposed and contiguous, (H, C): both products that use it,
``W @ h`` forwards and ``Wᵀ @ d`` backwards, are then in the layout the CPU's GEMM likes best.

``donate=True`` lets an op use its gate inputs as scratch; whoever passes it must own them and
not look at them again. ``from_zero=True`` says that the initial state h is 0, which saves a few
products. Differentiating twice is not available, and says so.
"""

from typing import Any

import torch
from torch import Tensor

from normrnn.ops import cells, native
from normrnn.ops.cells import Peephole
from normrnn.ops.once import once_differentiable
from normrnn.ops.steps import Steps


def _input(gates: Tensor, donate: bool) -> Tensor:
    return (
        gates
        if donate and gates.is_contiguous()
        else gates.clone(memory_format=torch.contiguous_format)
    )


def _owned(grad: Tensor | None, like: Tensor) -> Tensor:
    if grad is None:
        return torch.zeros_like(like)
    if not grad.is_contiguous() and grad.t().is_contiguous():
        return native.transposed(grad.t())
    return grad.clone(memory_format=torch.contiguous_format)


def _gradient_of(h0: Tensor, wanted: bool) -> Tensor | None:
    return torch.zeros_like(h0) if wanted else None


class _RNN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        h0: Tensor,
        w_hh: Tensor,
        steps: Steps,
        reverse: bool,
        from_zero: bool,
        relu: bool,
    ) -> Tensor:
        w_t = native.transposed(w_hh)
        hs = cells.rnn_forward(gates.data, h0, w_t.t(), steps, reverse, relu, from_zero)
        ctx.save_for_backward(hs, h0, w_t)
        ctx.how = steps, reverse, from_zero, relu
        return hs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hs, h0, w_t = ctx.saved_tensors
        steps, reverse, from_zero, relu = ctx.how
        dh0 = _gradient_of(h0, ctx.needs_input_grad[1])
        grad = cells.rnn_backward(_owned(grads[0], hs), hs, dh0, w_t, steps, reverse, relu)
        start = None if from_zero else h0
        d_w = cells.recurrent_gradient(grad, hs, start, steps, reverse)
        return grad, dh0, d_w, *(None,) * 4


class _LSTM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        h0: Tensor,
        c0: Tensor,
        w_hh: Tensor,
        w_ci: Tensor | None,
        w_cf: Tensor | None,
        w_co: Tensor | None,
        steps: Steps,
        reverse: bool,
        from_zero: bool,
    ) -> tuple[Tensor, Tensor]:
        peephole = Peephole(w_ci, w_cf, w_co)
        w_t = native.transposed(w_hh)
        run = native.lstm_forward if native.usable(gates) else cells.lstm_forward
        trace = run(gates.data, h0, c0, w_t.t(), peephole, steps, reverse, from_zero)
        ctx.save_for_backward(*trace, h0, c0, w_t, *peephole)
        ctx.how = steps, reverse, from_zero
        ctx.set_materialize_grads(False)
        return trace.hs, steps.final(trace.cs, reverse).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *trace, h0, c0, w_t, w_ci, w_cf, w_co = ctx.saved_tensors
        trace = cells.LSTMTrace(*trace)
        peephole, (steps, reverse, from_zero) = Peephole(w_ci, w_cf, w_co), ctx.how
        dhs, dc = _owned(grads[0], trace.hs), _owned(grads[1], c0)
        dh0 = _gradient_of(h0, ctx.needs_input_grad[1])
        run = native.lstm_backward if native.usable(dhs) else cells.lstm_backward
        grad = run(dhs, dc, trace, dh0, c0, w_t, peephole, steps, reverse)
        start = None if from_zero else h0
        d_w = cells.recurrent_gradient(grad, trace.hs, start, steps, reverse)
        d_peep = cells.peephole_gradient(grad, trace.cs, c0, peephole, steps, reverse)
        return grad, dh0, dc, d_w, *d_peep, None, None, None


class _GRU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        h0: Tensor,
        w_hh: Tensor,
        bias_hn: Tensor | None,
        steps: Steps,
        reverse: bool,
        from_zero: bool,
    ) -> Tensor:
        w_t = native.transposed(w_hh)
        trace = cells.gru_forward(gates.data, h0, w_t.t(), bias_hn, steps, reverse)
        ctx.save_for_backward(*trace, h0, w_t)
        ctx.how = steps, reverse, from_zero, bias_hn is not None
        return trace.hs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *trace, h0, w_t = ctx.saved_tensors
        trace = cells.GRUTrace(*trace)
        steps, reverse, from_zero, biased = ctx.how
        dh0 = _gradient_of(h0, ctx.needs_input_grad[1])
        dhs = _owned(grads[0], trace.hs)
        grad, d_q = cells.gru_backward(dhs, trace, h0, dh0, w_t, steps, reverse)
        start, rz = None if from_zero else h0, grad[: 2 * h0.shape[0]]
        d_w = torch.cat(
            [cells.recurrent_gradient(d, trace.hs, start, steps, reverse) for d in (rz, d_q)]
        )
        return grad, dh0, d_w, d_q.sum(1) if biased else None, None, None, None


def rnn(
    gates: Tensor,
    h0: Tensor,
    w_hh: Tensor,
    steps: Steps,
    *,
    reverse: bool = False,
    nonlinearity: str = "tanh",
    donate: bool = False,
    from_zero: bool = False,
) -> Tensor:
    """h_t = φ(gates_t + W_h h_{t−1}). (H, N), (H, B), (H, H) -> states (H, N)."""
    relu = nonlinearity == "relu"
    return _RNN.apply(_input(gates, donate), h0, w_hh, steps, reverse, from_zero, relu)  # type: ignore


def lstm(
    gates: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_hh: Tensor,
    steps: Steps,
    *,
    peephole: Peephole = Peephole(),  # noqa: B008 (immutable)
    reverse: bool = False,
    donate: bool = False,
    from_zero: bool = False,
) -> tuple[Tensor, Tensor]:
    """(4H, N), (H, B) twice, (4H, H) -> states (H, N) and the final cells (H, B)."""
    return _LSTM.apply(  # type: ignore
        _input(gates, donate), h0, c0, w_hh, *peephole, steps, reverse, from_zero
    )


def gru(
    gates: Tensor,
    h0: Tensor,
    w_hh: Tensor,
    bias_hn: Tensor | None,
    steps: Steps,
    *,
    reverse: bool = False,
    donate: bool = False,
    from_zero: bool = False,
) -> Tensor:
    """(3H, N), (H, B), (3H, H), (H,) -> states (H, N)."""
    return _GRU.apply(_input(gates, donate), h0, w_hh, bias_hn, steps, reverse, from_zero)  # type: ignore
