"""The three cells as step loops over feature-major columns, forward and backward.

Each cell takes ready gate inputs (C, N) (the input projection lives outside the recurrence),
adds the recurrent part step by step, and keeps what its backward pass needs. The backward loop
is short because every derivative factor that does not depend on the incoming gradient is
computed in bulk before it, and the weight gradient is one matrix product after it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from normrnn.ops.steps import Steps

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input


class Peephole(NamedTuple):
    """Diagonal connections from the cell to its gates, each (H,) or None (paper: W_co)."""

    i: Tensor | None = None
    f: Tensor | None = None
    o: Tensor | None = None


def carry(state: Tensor, width: int, start: Tensor) -> Tensor:
    """The state for the next step's sequences: some have ended, or, backwards, some begin."""
    have = state.shape[1]
    if have == width:
        return state
    if have > width:
        return state[:, :width]
    return torch.cat([state, start[:, have:width]], 1)


def add_product_(target: Tensor, weight: Tensor, columns: Tensor) -> Tensor:
    """target += weight @ columns, (M, b) from (M, K) and b columns of a wider (K, N).

    The CPU's GEMM takes up to five times as long for 9 columns as for 16. So a narrow or odd
    number is widened to a multiple of 8 by reading on into the columns that follow, whatever
    they hold; what they give is dropped.
    """
    b = columns.shape[1]
    if (b % 8 == 0 and b >= 16) or b == 1 or columns.device.type != "cpu":
        return target.addmm_(weight, columns)
    wide, (stride, step), offset = (
        max(16, -(-b // 8) * 8),
        columns.stride(),
        columns.storage_offset(),
    )
    end = offset + (columns.shape[0] - 1) * stride + wide
    if step != 1 or stride < wide or end * columns.itemsize > columns.untyped_storage().nbytes():
        return target.addmm_(weight, columns)
    product = weight @ columns.as_strided((columns.shape[0], wide), (stride, 1), offset)
    return target.add_(product[:, :b])


def recurrent_gradient(
    grad: Tensor, hs: Tensor, h0: Tensor | None, steps: Steps, reverse: bool
) -> Tensor:
    """Σ_t grad_t h_{t−1}ᵀ, (C, N) with (H, N) -> (C, H); ``h0`` None stands for 0."""
    total = None
    for columns, before in steps.previous(hs, h0, reverse):
        if total is None:
            total = grad[:, columns] @ before.t()
        else:
            total.addmm_(grad[:, columns], before.t())
    return grad.new_zeros(grad.shape[0], hs.shape[0]) if total is None else total


class StateGradient:
    """Carries dL/dh_{t−1} to the step before, or to h0 where a sequence began.

    ``dh0`` (H, B) starts at 0; None if nobody asks for it.
    """

    def __init__(self, dhs: Tensor, dh0: Tensor | None, steps: Steps, reverse: bool):
        self.sizes, self.dhs, self.dh0 = steps.sizes, steps.cut(dhs), dh0
        self.backwards = steps.order(not reverse)
        self._toward = 1 if reverse else -1

    def send(self, t: int, weight_t: Tensor, grad: Tensor) -> None:
        """Adds Wᵀ grad to the gradient of the state before step t; ``grad`` is (C, width of t)."""
        for target, columns in self.before(t):
            add_product_(target, weight_t, grad if columns is None else grad[:, columns])

    def before(self, t: int) -> list[tuple[Tensor, slice | None]]:
        """Where that gradient goes, and which columns of step t go there; None: all."""
        width, p = self.sizes[t], t + self._toward
        have = self.sizes[p] if 0 <= p < len(self.sizes) else 0
        if have == width:
            return [(self.dhs[p], None)]
        if have > width:
            return [(self.dhs[p][:, :width], None)]
        targets: list[tuple[Tensor, slice | None]] = []
        if have:
            targets.append((self.dhs[p], slice(0, have)))
        if self.dh0 is not None:
            targets.append((self.dh0[:, have:width], slice(have, width)))
        return targets


def rnn_forward(
    gates: Tensor,
    h0: Tensor,
    weight: Tensor,
    steps: Steps,
    reverse: bool,
    relu: bool,
    from_zero: bool,
) -> Tensor:
    """h_t = φ(a_t + W_h h_{t−1}): gates (H, N) become the states, in place."""
    h, cut = h0, steps.cut(gates)
    for t in steps.order(reverse):
        g = cut[t]
        if h is not h0 or not from_zero:
            add_product_(g, weight, carry(h, steps.sizes[t], h0))
        h = g.relu_() if relu else g.tanh_()
    return gates


def rnn_backward(
    dhs: Tensor,
    hs: Tensor,
    dh0: Tensor | None,
    weight_t: Tensor,
    steps: Steps,
    reverse: bool,
    relu: bool,
) -> Tensor:
    """Turns dhs (H, N), in place, into the gradient of the gate inputs.

    What flows into the initial state is added to dh0 (H, B).
    """
    slope = (hs > 0).to(hs.dtype) if relu else torch.addcmul(torch.ones_like(hs), hs, hs, value=-1)
    slopes, flow = steps.cut(slope), StateGradient(dhs, dh0, steps, reverse)
    for t in flow.backwards:
        d = flow.dhs[t].mul_(slopes[t])
        flow.send(t, weight_t, d)
    return dhs


class LSTMTrace(NamedTuple):
    """Activated gates (4H, N), cells c and tanh(c) (H, N), states h (H, N)."""

    gates: Tensor
    cs: Tensor
    tanh_cs: Tensor
    hs: Tensor


def lstm_forward(
    gates: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight: Tensor,
    peephole: Peephole,
    steps: Steps,
    reverse: bool,
    from_zero: bool,
) -> LSTMTrace:
    """Paper, section 3.1. Gate inputs (4H, N), order i, f, g, o, are activated in place."""
    H = h0.shape[0]
    hs = gates.new_empty(H, gates.shape[1])
    cs, tanh_cs = torch.empty_like(hs), torch.empty_like(hs)
    all_g, all_if = steps.cut(gates), steps.cut(gates[: 2 * H])
    all_i, all_f, all_c, all_o = (steps.cut(gate) for gate in gates.chunk(4))
    all_h, all_cs, all_tc = steps.cut(hs), steps.cut(cs), steps.cut(tanh_cs)
    pi, pf, po = (None if p is None else p.unsqueeze(1) for p in peephole)
    h, c = h0, c0
    for t in steps.order(reverse):
        b = steps.sizes[t]
        c = carry(c, b, c0)
        i, f, g, o, tc = all_i[t], all_f[t], all_c[t], all_o[t], all_tc[t]
        if h is not h0 or not from_zero:
            add_product_(all_g[t], weight, carry(h, b, h0))
        if pi is not None:
            i.addcmul_(pi, c)
        if pf is not None:
            f.addcmul_(pf, c)
        all_if[t].sigmoid_()
        g.tanh_()
        c = torch.mul(f, c, out=all_cs[t]).addcmul_(i, g)
        if po is not None:
            o.addcmul_(po, c)
        o.sigmoid_()
        torch.tanh(c, out=tc)
        h = torch.mul(o, tc, out=all_h[t])
    return LSTMTrace(gates, cs, tanh_cs, hs)


def lstm_backward(
    dhs: Tensor,
    dc: Tensor,
    trace: LSTMTrace,
    dh0: Tensor | None,
    c0: Tensor,
    weight_t: Tensor,
    peephole: Peephole,
    steps: Steps,
    reverse: bool,
) -> Tensor:
    """The gradient of the gate inputs (4H, N).

    Overwrites dhs (H, N), leaves the gradient of c0 in dc (H, B), adds that of h0 to dh0 (H, B).
    """
    H = c0.shape[0]
    i, f, g, o = trace.gates.chunk(4)
    grad = torch.empty_like(trace.gates)
    d_i, d_f, d_g, d_o = grad.chunk(4)
    _sigmoid_backward(g, i, grad_input=d_i)
    for columns, before in steps.previous(trace.cs, c0, reverse):
        _sigmoid_backward(before, f[:, columns], grad_input=d_f[:, columns])
    _tanh_backward(i, g, grad_input=d_g)
    _sigmoid_backward(trace.tanh_cs, o, grad_input=d_o)
    h_to_c = torch.empty_like(trace.cs)
    _tanh_backward(o, trace.tanh_cs, grad_input=h_to_c)

    all_d, all_ifg = steps.cut(grad), steps.cut(grad[: 3 * H].view(3, H, -1))
    all_i, all_f, all_o = steps.cut(d_i), steps.cut(d_f), steps.cut(d_o)
    all_hc, all_forget = steps.cut(h_to_c), steps.cut(f)
    pi, pf, po = (None if p is None else p.unsqueeze(1) for p in peephole)
    flow = StateGradient(dhs, dh0, steps, reverse)
    width = dc.shape[1]
    for t in flow.backwards:
        b = steps.sizes[t]
        dc_t = dc if b == width else dc[:, :b]
        dh = flow.dhs[t]
        do = all_o[t].mul_(dh)
        dc_t.addcmul_(dh, all_hc[t])
        if po is not None:
            dc_t.addcmul_(do, po)
        all_ifg[t].mul_(dc_t)
        dc_t.mul_(all_forget[t])
        if pi is not None:
            dc_t.addcmul_(all_i[t], pi)
        if pf is not None:
            dc_t.addcmul_(all_f[t], pf)
        flow.send(t, weight_t, all_d[t])
    return grad


def peephole_gradient(
    grad: Tensor,
    cs: Tensor,
    c0: Tensor,
    peephole: Peephole,
    steps: Steps,
    reverse: bool,
) -> Peephole:
    """i and f look at c_{t−1}, o at c_t."""
    d_i, d_f, _, d_o = grad.chunk(4)

    def seen_before(d: Tensor) -> Tensor:
        parts = steps.previous(cs, c0, reverse)
        return sum((d[:, columns] * before).sum(1) for columns, before in parts)  # type: ignore

    return Peephole(
        None if peephole.i is None else seen_before(d_i),
        None if peephole.f is None else seen_before(d_f),
        None if peephole.o is None else (d_o * cs).sum(1),
    )


class GRUTrace(NamedTuple):
    """Activated gates r, z, n (3H, N); q = W_hn h_{t−1} + b_hn and states h, both (H, N)."""

    gates: Tensor
    q: Tensor
    hs: Tensor


def gru_forward(
    gates: Tensor,
    h0: Tensor,
    weight: Tensor,
    bias_hn: Tensor | None,
    steps: Steps,
    reverse: bool,
) -> GRUTrace:
    """h_t = (1−z) n + z h_{t−1}, n = tanh(a_n + r (W_hn h_{t−1} + b_hn)), as in torch."""
    H = h0.shape[0]
    hs = gates.new_empty(H, gates.shape[1])
    qs = torch.empty_like(hs)
    w_rz, w_n = weight[: 2 * H], weight[2 * H :]
    bias = gates.new_zeros(H, 1) if bias_hn is None else bias_hn.unsqueeze(1)
    all_rz = steps.cut(gates[: 2 * H])
    all_r, all_z, all_n = (steps.cut(gate) for gate in gates.chunk(3))
    all_q, all_h = steps.cut(qs), steps.cut(hs)
    h = h0
    for t in steps.order(reverse):
        h = carry(h, steps.sizes[t], h0)
        add_product_(all_rz[t], w_rz, h).sigmoid_()
        q = torch.addmm(bias, w_n, h, out=all_q[t])
        n = all_n[t].addcmul_(all_r[t], q).tanh_()
        h = torch.sub(h, n, out=all_h[t]).mul_(all_z[t]).add_(n)
    return GRUTrace(gates, qs, hs)


def gru_backward(
    dhs: Tensor,
    trace: GRUTrace,
    h0: Tensor,
    dh0: Tensor | None,
    weight_t: Tensor,
    steps: Steps,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the gate inputs (3H, N) and of q (H, N). Overwrites dhs, adds to dh0."""
    H = h0.shape[0]
    r, z, n = trace.gates.chunk(3)
    grad, d_q = torch.empty_like(trace.gates), torch.empty_like(trace.q)
    d_r, d_z, d_n = grad.chunk(3)
    _sigmoid_backward(trace.q, r, grad_input=d_r)
    for columns, before in steps.previous(trace.hs, h0, reverse):
        _sigmoid_backward(before - n[:, columns], z[:, columns], grad_input=d_z[:, columns])
    _tanh_backward(1 - z, n, grad_input=d_n)

    all_rz, all_q = steps.cut(grad[: 2 * H]), steps.cut(d_q)
    all_dr, all_dz, all_dn = steps.cut(d_r), steps.cut(d_z), steps.cut(d_n)
    all_r, all_z = steps.cut(r), steps.cut(z)
    w_rz, w_n = weight_t[:, : 2 * H], weight_t[:, 2 * H :]
    flow = StateGradient(dhs, dh0, steps, reverse)
    for t in flow.backwards:
        dh = flow.dhs[t]
        all_dz[t].mul_(dh)
        dn = all_dn[t].mul_(dh)
        all_dr[t].mul_(dn)
        dq = torch.mul(dn, all_r[t], out=all_q[t])
        direct = dh.mul_(all_z[t])
        for target, columns in flow.before(t):
            target.add_(direct if columns is None else direct[:, columns])
        flow.send(t, w_rz, all_rz[t])
        flow.send(t, w_n, dq)
    return grad, d_q
