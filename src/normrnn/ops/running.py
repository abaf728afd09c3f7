"""Statistics for test time: running averages, per-step slots, population statistics."""

from typing import Any

import torch
from torch import Tensor

from normrnn.ops.native import kernel
from normrnn.ops.statistics import Statistics, constant_groups, pool, unbiased, without_constant

MOST_STEPS, ENOUGH_ROWS = 512, 30
_OPS = torch.library.Library("normrnn", "FRAGMENT")
_OPS.define(
    "update_(Tensor(a!) mean, Tensor(b!) var, Tensor(c!) tracked, "
    "Tensor batch_mean, Tensor batch_var, Tensor count, float? momentum, int inputs=0) -> ()"
)
_OPS.define("store_(Tensor(a!) buffer, Tensor value) -> ()")


def store_(buffer: Tensor, value: Tensor) -> None:
    """Run ``buffer.copy_(value)`` in a way that transforms of torch.func allow."""
    if kernel.is_addressable((buffer, value)):
        with torch.no_grad():
            buffer.copy_(value)
    else:
        torch.ops.normrnn.store_(buffer, value)


@torch.library.impl(_OPS, "store_", "CompositeExplicitAutograd")
def _store(buffer: Tensor, value: Tensor) -> None:
    if buffer.shape != value.shape:
        raise ValueError(f"a buffer of shape {buffer.shape} cannot take the shape {value.shape}")
    buffer.copy_(value)


def update_running_(
    mean: Tensor,
    var: Tensor,
    tracked: Tensor,
    batch: Statistics,
    momentum: float | None,
    inputs: int = 0,
) -> None:
    """Update running statistics, shared over time, (C,), or one slot per time step, (K, C).

    Shared ones are updated from all rows of the batch, slots from the first K steps. A batch with
    a non-finite value, at whatever step, changes nothing; neither does a group of a single row.

    Args:
        tracked: the number of updates, () or (K,).
        momentum: the weight of the new value, as in torch; None: the average of all updates.
        inputs: how many channels, the first ones, are those of W_x x; there groups whose rows are
            all equal are left out.
    """
    if not kernel.is_addressable((mean, var, tracked, *batch)):
        torch.ops.normrnn.update_(mean, var, tracked, *batch, momentum, inputs)
        return
    if momentum is not None and not tracked.dim():
        done = kernel.update(mean, var, batch, momentum, inputs)
        if done is not None:
            tracked += int(done)
            return
    _update_by_torch_(mean, var, tracked, batch, momentum, inputs)


def _update_by_torch_(
    mean: Tensor,
    var: Tensor,
    tracked: Tensor,
    batch: Statistics,
    momentum: float | None,
    inputs: int,
) -> None:
    is_finite = _is_finite(batch)
    if tracked.dim():
        used = min(len(mean), len(batch.mean))
        mean, var, tracked = mean[:used], var[:used], tracked[:used]
        batch = without_constant(Statistics(*(value[:used] for value in batch)), inputs)
        good = (batch.count > 1) & is_finite
    else:
        mean, var, tracked = mean[None], var[None], tracked.view(1)
        batch = without_constant(batch, inputs)
        good = (batch.count > 1).any(0, keepdim=True) & is_finite
        batch = pool(batch)
    _average_(mean, var, tracked, batch, good, momentum)


@torch.library.impl(_OPS, "update_", "CompositeExplicitAutograd")
def _update(
    mean: Tensor,
    var: Tensor,
    tracked: Tensor,
    batch_mean: Tensor,
    batch_var: Tensor,
    count: Tensor,
    momentum: float | None,
    inputs: int = 0,
) -> None:
    """``update_running_`` as an operator."""
    batch = Statistics(batch_mean, batch_var, count)
    _check_update(mean, var, tracked, batch, inputs)
    if count.is_cpu and bool((count == 1).any() & (count <= 1).all() & (tracked == 0).all()):
        # In eager mode this is an error before the call; a graph knows the rows only here.
        raise ValueError(
            "a batch with a single row cannot be normalised before running statistics were "
            "gathered: begin with a larger batch, or use norm='layer'"
        )
    is_addressable = kernel.is_addressable((mean, var, tracked, *batch))
    update = update_running_ if is_addressable else _update_by_torch_  # a tensor subclass
    update(mean, var, tracked, batch, momentum, inputs)


def _check_update(
    mean: Tensor, var: Tensor, tracked: Tensor, batch: Statistics, inputs: int
) -> None:
    groups, channels = batch.count.shape[:1], mean.shape[-1:]
    shapes = (
        (mean, (*tracked.shape, *channels)),
        (var, mean.shape),
        (batch.mean, (*groups, *channels)),
        (batch.var, batch.mean.shape),
        (batch.count, groups),
    )
    if tracked.dim() > 1 or not groups or any(t.shape != shape for t, shape in shapes):
        shapes_seen = ", ".join(str(tuple(t.shape)) for t in (mean, var, tracked, *batch))
        raise ValueError(f"shapes of running and batch statistics do not fit: {shapes_seen}")
    if not 0 <= inputs <= mean.shape[-1]:
        raise ValueError(f"statistics of {mean.shape[-1]} channels cannot have {inputs} inputs")


def _fake(*_: Any) -> None:
    pass


def _refuse_vmap(*_: Any) -> None:
    raise RuntimeError(
        "running statistics cannot be updated under vmap, which has many batches at once: "
        "use eval(), or `with normrnn.batch_statistics(model):`"
    )


for _name in ("normrnn::update_", "normrnn::store_"):
    torch.library.register_fake(_name, _fake, lib=_OPS)
    torch.library.register_vmap(_name, _refuse_vmap, lib=_OPS)


def _is_finite(batch: Statistics) -> Tensor:
    """Whether all rows of the batch are finite: a mean is not if one of its rows is not."""
    # The sum is finite unless one of its terms is not: one test for both.
    return ((batch.mean + batch.var).isfinite() | (batch.count == 0)[:, None]).all()


@torch.no_grad()  # inside, since a graph that ends with an error would leave gradients off
def _average_(
    mean: Tensor,
    var: Tensor,
    tracked: Tensor,
    batch: Statistics,
    good: Tensor,
    momentum: float | None,
) -> None:
    good = good if good.dim() == 2 else good[:, None]
    one = torch.ones_like(tracked, dtype=batch.mean.dtype)
    share = (one / (tracked + 1) if momentum is None else one * momentum)[:, None]
    for buffer, value in ((mean, batch.mean), (var, unbiased(batch))):
        old = buffer.to(value.dtype)
        buffer.copy_(old.lerp(torch.where(good, value, old), share))
    tracked += good.any(1).to(tracked.dtype)


def slots_for(tracked: Tensor, steps: int) -> Tensor:
    """Return the slot of each time step, (steps,): the last one ≤ min(t, K−1) that has ever been
    updated, else the first one that has, else 0.

    >>> slots_for(torch.tensor([0, 4, 4, 0, 2]), 7).tolist()
    [1, 1, 2, 2, 4, 4, 4]
    """
    slot, is_updated = torch.arange(len(tracked), device=tracked.device), tracked > 0
    # ONNX has no cummax, and no argmax of bool.
    last = torch.where(is_updated & (slot <= slot.unsqueeze(1)), slot, -1).amax(1)
    last = torch.where(last < 0, is_updated.long().argmax(), last)
    return last[torch.arange(steps, device=tracked.device).clamp(max=len(tracked) - 1)]


class Population:
    """Statistics of any number of batches, pooled in float64.

    Rows count equally however they were split into batches.

    Args:
        slots: the number of time steps with statistics of their own; None: shared over time.
        inputs: how many channels, the first ones, are those of W_x x; there time steps whose rows
            are all equal are left out.
        per_step: batches have one group per time step, for :attr:`step_difference`.
    """

    def __init__(self, slots: int | None = None, inputs: int = 0, per_step: bool = False):
        self._steps = Population(MOST_STEPS, inputs) if per_step and slots is None else None
        self.shared, self.groups, self.inputs = slots is None, slots or 1, inputs
        self.batches = 0
        self._count = self._mean = self._squares = torch.zeros(0)

    def add(self, batch: Statistics) -> None:
        if self._steps is not None:
            self._steps.add(batch)
        batch = without_constant(batch, self.inputs)
        if self.shared:
            batch = pool(batch)
        used = min(self.groups, len(batch.mean))
        mean, var, count = (v[:used].detach().to("cpu", torch.float64) for v in batch)
        rows = (count if count.dim() == 2 else count[:, None]).expand_as(mean)
        if not bool((mean.isfinite() & var.isfinite() | (rows == 0)).all()):
            return
        if not self.batches:
            self._mean = torch.zeros(self.groups, mean.shape[1], dtype=torch.float64)
            self._count, self._squares = torch.zeros_like(self._mean), torch.zeros_like(self._mean)
        mean, var = (torch.where(rows > 0, value, 0.0) for value in (mean, var))
        old = self._count[:used].clone()
        share = rows / (old + rows).clamp(min=1)
        delta = mean - self._mean[:used]
        self._squares[:used] += var * rows + delta.square() * old * share
        self._mean[:used] += delta * share
        self._count[:used] += rows
        self.batches += 1

    def enough(self, rows: int = 2) -> Tensor:
        """Return where there are so many rows and, of W_x x, not always the same: (groups, C)."""
        several, of_input = self._count >= rows, slice(self.inputs)
        if self.inputs:
            count = self._count[:, of_input].amax(1)
            statistics = Statistics(self._mean[:, of_input], self.biased_var[:, of_input], count)
            several[:, of_input] &= ~constant_groups(statistics)
        return several

    @property
    def step_difference(self) -> float:
        """How far statistics shared over time are from those of each step: the mean square change
        of normalised rows, 0 if all steps are alike.

        (x − μ_t)/σ_t and (x − μ)/σ differ by (μ_t − μ)/σ and σ_t/σ − 1. Steps with few rows, and
        those beyond the first `MOST_STEPS`, do not count.
        """
        if self._steps is None or not self._steps.batches:
            return 0.0
        of_input = slice(self.inputs or None)
        count, steps = self._steps._count[:, of_input], self._steps
        sigma = self.biased_var[:, of_input].sqrt().clamp(min=1e-30)
        shift = (steps.mean[:, of_input] - self.mean[:, of_input]) / sigma
        scale = steps.biased_var[:, of_input].sqrt() / sigma - 1
        rows = torch.where(count < ENOUGH_ROWS, 0.0, count)
        return float(((shift.square() + scale.square()) * rows).sum() / rows.sum().clamp(min=1))

    @property
    def mean(self) -> Tensor:
        """(groups, C)."""
        return self._mean

    @property
    def biased_var(self) -> Tensor:
        """(groups, C)."""
        return self._squares / self._count.clamp(min=1)

    @property
    def var(self) -> Tensor:
        """Unbiased, (groups, C)."""
        return self._squares / (self._count - 1).clamp(min=1)
