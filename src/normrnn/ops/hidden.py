"""Normalisation inside the recurrence (paper, appendix): h_t = φ(BN(W_h h_{t−1} + W_x x_t)).

Statistics of step t are known only once step t − 1 is done, so these are plain loops that
autograd differentiates. Everything is feature-major, as in :mod:`normrnn.ops.recurrence`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.ops.cells import Peephole, carry
from normrnn.ops.normalise import Fixed
from normrnn.ops.statistics import Statistics, wide
from normrnn.ops.steps import Steps


class StepNormaliser:
    """Normalises the sums of one time step at a time and remembers their statistics.

    γ and β, (C,), are shared over steps. A step with one row uses ``fixed`` (C, 1 or T).
    """

    def __init__(
        self,
        weight: Tensor | None,
        bias: Tensor | None,
        steps: Steps,
        *,
        eps: float = 1e-5,
        fixed: Fixed | None = None,
        batch: bool = True,
        lenient: bool = False,
    ):
        if batch and steps.batch == 1 and not lenient:
            raise ValueError(
                "normalising with batch statistics needs more than one sequence in at least one "
                "time step, got a batch of 1; use a larger batch, or eval() mode"
            )
        if fixed is None and (not batch or steps.sizes[-1] == 1):
            raise ValueError(
                "a time step with a single row is normalised with running statistics, and there "
                "are none: construct the layer with track_running_stats=True"
            )
        self.weight, self.bias, self.steps, self.eps = weight, bias, steps, eps
        self.fixed, self.batch = fixed, batch
        self._seen: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, t: int, sums: Tensor, channels: slice = slice(None)) -> Tensor:
        """(C′, width of step t) for C′ of the C channels; parts of a step come in order."""
        x, width = sums.unsqueeze(0).to(wide(sums.dtype)), sums.shape[1]
        weight = None if self.weight is None else self.weight[channels].to(x.dtype)
        bias = None if self.bias is None else self.bias[channels].to(x.dtype)
        if self.batch and width > 1:
            mean, var = x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
            out = F.batch_norm(x, mean, var, weight, bias, True, 1.0, self.eps)
            self._seen.setdefault(t, []).append((mean, var * ((width - 1) / width)))
        else:
            assert self.fixed is not None
            mean, var = (self._at(t, value)[channels].to(x.dtype) for value in self.fixed)
            out = F.batch_norm(x, mean, var, weight, bias, False, 0.0, self.eps)
            row = x.detach().flatten(1).squeeze(0) if width == 1 else mean
            self._seen.setdefault(t, []).append((row, torch.zeros_like(row)))
        return out.squeeze(0).to(sums.dtype)

    @staticmethod
    def _at(t: int, value: Tensor) -> Tensor:
        return value[:, t if value.shape[1] > 1 else 0]

    def statistics(self) -> Statistics:
        """Mean and biased variance (C, T) of the steps as they were in this batch."""
        parts = [
            [torch.cat(parts) for parts in zip(*self._seen[t], strict=True)]
            for t in range(len(self.steps))
        ]
        mean, var = (torch.stack(columns, 1) for columns in zip(*parts, strict=True))
        count = torch.tensor(self.steps.sizes, dtype=mean.dtype, device=mean.device)
        return Statistics(mean, var, count)


def _together(states: dict[int, Tensor]) -> Tensor:
    return torch.cat([states[t] for t in range(len(states))], 1)


def rnn(
    pre: Tensor,
    h0: Tensor,
    w_hh: Tensor,
    steps: Steps,
    norm: StepNormaliser,
    *,
    reverse: bool = False,
    nonlinearity: str = "tanh",
) -> Tensor:
    """(H, N), (H, B), (H, H) -> states (H, N)."""
    phi = torch.relu if nonlinearity == "relu" else torch.tanh
    h, states, cut = h0, {}, steps.cut(pre)
    for t in steps.order(reverse):
        h = phi(norm(t, torch.addmm(cut[t], w_hh, carry(h, steps.sizes[t], h0))))
        states[t] = h
    return _together(states)


def lstm(
    pre: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_hh: Tensor,
    steps: Steps,
    norm: StepNormaliser,
    *,
    peephole: Peephole = Peephole(),  # noqa: B008 (immutable)
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """The 4H sums are normalised; peephole terms are added after. -> (H, N) and (H, B)."""
    pi, pf, po = (0.0 if p is None else p.unsqueeze(1) for p in peephole)
    h, c, cut = h0, c0, steps.cut(pre)
    states, memories = {}, {}
    for t in steps.order(reverse):
        h, c = carry(h, steps.sizes[t], h0), carry(c, steps.sizes[t], c0)
        i, f, g, o = norm(t, torch.addmm(cut[t], w_hh, h)).chunk(4)
        i, f = i + pi * c, f + pf * c
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = (o + po * c).sigmoid() * c.tanh()
        states[t], memories[t] = h, c
    return _together(states), steps.final(_together(memories), reverse)


def gru(
    pre: Tensor,
    h0: Tensor,
    w_hh: Tensor,
    bias_hn: Tensor | None,
    steps: Steps,
    norm: StepNormaliser,
    *,
    reverse: bool = False,
) -> Tensor:
    """Normalised: the sums of r and z, then W_x x + r ⊙ (W_h h + b) of the candidate."""
    H = h0.shape[0]
    bias = h0.new_zeros(H, 1) if bias_hn is None else bias_hn.unsqueeze(1)
    h, states, cut = h0, {}, steps.cut(pre)
    for t in steps.order(reverse):
        h = carry(h, steps.sizes[t], h0)
        sums = torch.addmm(cut[t][: 2 * H], w_hh[: 2 * H], h)
        r, z = norm(t, sums, slice(0, 2 * H)).sigmoid().chunk(2)
        candidate = cut[t][2 * H :] + r * torch.addmm(bias, w_hh[2 * H :], h)
        n = norm(t, candidate, slice(2 * H, None)).tanh()
        h = n + z * (h - n)
        states[t] = h
    return _together(states)
