"""Statistics for test time: running averages, per-step slots, population statistics."""

import torch
from torch import Tensor

from normrnn.ops import native
from normrnn.ops.statistics import Statistics, pool, unbiased


def update_shared_(
    mean: Tensor, var: Tensor, tracked: Tensor, batch: Statistics, momentum: float | None
) -> None:
    """One update of buffers (C,) shared over time, from all rows of the batch.

    A batch with a non-finite value leaves everything as it was. ``momentum`` is the weight of
    the new value, as in torch; None means the average of all updates so far.
    """
    if momentum is not None and _kernel_serves(mean, var, batch):
        width = int(batch.count[0])
        tracked += native.update_running(mean, var, batch.mean, batch.var, width, momentum)
        return
    pooled = pool(batch)
    good = (pooled.count > 1) & _finite(pooled)
    _update_(mean.unsqueeze(1), var.unsqueeze(1), tracked.view(1), pooled, good, momentum)


def update_steps_(
    mean: Tensor, var: Tensor, tracked: Tensor, batch: Statistics, momentum: float | None
) -> None:
    """Updates slots (K, C) from the first K steps of the batch that have more than one row.

    A non-finite value at any step, a lone row's or one past the last slot, prevents them all.
    """
    used = min(mean.shape[0], batch.mean.shape[1])
    first = Statistics(batch.mean[:, :used], batch.var[:, :used], batch.count[:used])
    slots = mean[:used].t(), var[:used].t(), tracked[:used]
    _update_(*slots, first, (first.count > 1) & _finite(batch), momentum)


def _kernel_serves(mean: Tensor, var: Tensor, batch: Statistics) -> bool:
    """Groups of one width, and everything in the one type the kernel is written for."""
    tensors = mean, var, batch.mean, batch.var
    right = all(native.usable(x) and x.is_contiguous() for x in tensors)
    return right and bool(batch.count[0] == batch.count[-1]) and bool(batch.count[0] > 1)


def _finite(batch: Statistics) -> Tensor:
    """Whether all rows of the batch were finite: a mean is not if one of its rows is not."""
    # The sum is finite unless a part of it is not: one look at both.
    return ((batch.mean + batch.var).isfinite() | (batch.count == 0)).all()


def _update_(
    mean: Tensor,
    var: Tensor,
    tracked: Tensor,
    batch: Statistics,
    good: Tensor,
    momentum: float | None,
) -> None:
    one = torch.ones_like(batch.count, dtype=batch.mean.dtype)
    share = one / (tracked + 1) if momentum is None else one * momentum
    for buffer, value in ((mean, batch.mean), (var, unbiased(batch))):
        old = buffer.to(value.dtype)
        buffer.copy_(old.lerp(torch.where(good, value, old), share))
    tracked += good.to(tracked.dtype)


def slots_for(tracked: Tensor, steps: int) -> Tensor:
    """For steps 0 … steps−1 the last slot ≤ min(t, K−1) that has ever been updated, (steps,).

    >>> slots_for(torch.tensor([4, 4, 0, 2]), 6).tolist()
    [0, 1, 1, 3, 3, 3]
    """
    slot = torch.arange(len(tracked), device=tracked.device)
    last = torch.where(tracked > 0, slot, -1).cummax(0).values.clamp(min=0)
    return last[torch.arange(steps, device=tracked.device).clamp(max=len(tracked) - 1)]


class Population:
    """Pools (count, mean, centred squares) of any number of batches, in float64.

    Rows count equally however they were split into batches.
    """

    def __init__(self, groups: int):
        """Args: groups: 1 for statistics shared over time, else the number of slots."""
        self.groups = groups
        self.batches = 0
        self._count = torch.zeros(groups, dtype=torch.float64)
        self._mean = torch.zeros(0)
        self._squares = torch.zeros(0)

    def add(self, batch: Statistics) -> None:
        if self.groups == 1:
            batch = pool(batch)
        used = min(self.groups, batch.mean.shape[1])
        mean, var = (v[:, :used].detach().to("cpu", torch.float64) for v in (batch.mean, batch.var))
        count = batch.count[:used].detach().to("cpu", torch.float64)
        if not bool((mean.isfinite() & var.isfinite() | (count == 0)).all()):
            return
        if not self.batches:
            self._mean = torch.zeros(mean.shape[0], self.groups, dtype=torch.float64)
            self._squares = torch.zeros_like(self._mean)
        mean = torch.where(count > 0, mean, 0.0)
        var = torch.where(count > 0, var, 0.0)
        old = self._count[:used].clone()
        share = count / (old + count).clamp(min=1)
        delta = mean - self._mean[:, :used]
        self._squares[:, :used] += var * count + delta.square() * old * share
        self._mean[:, :used] += delta * share
        self._count[:used] += count
        self.batches += 1

    @property
    def enough(self) -> Tensor:
        """Which groups have more than one row, (groups,)."""
        return self._count > 1

    @property
    def mean(self) -> Tensor:
        """(C, groups)."""
        return self._mean

    @property
    def biased_var(self) -> Tensor:
        """(C, groups)."""
        return self._squares / self._count.clamp(min=1)

    @property
    def var(self) -> Tensor:
        """Unbiased, (C, groups)."""
        return self._squares / (self._count - 1).clamp(min=1)
