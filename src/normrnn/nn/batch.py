"""Batch statistics, on the input transition or inside the steps, and those of test time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from normrnn.nn.normaliser import watched
from normrnn.nn.statistical import StatisticalNorm
from normrnn.ops.call import InputNorm, Plug, StepNorm
from normrnn.ops.fold import Weights, fold, fold_inside, unfold
from normrnn.ops.loop import input_norm
from normrnn.ops.normalise import Fixed
from normrnn.ops.running import Population, slots_for, update_shared_, update_steps_
from normrnn.ops.statistics import (
    EVERYBODY,
    Groups,
    Pool,
    Statistics,
    measure,
    synchronised,
)
from normrnn.ops.steps import Steps, Traced


class Normaliser(StatisticalNorm):
    """Batch normalisation of C channels over rows, sequence-wise or step by step.

    Shapes: ``weight`` (γ) and ``bias`` (β) are (C,). Without ``time_steps`` the buffers
    ``running_mean`` and ``running_var`` are (C,) and shared over time; with ``time_steps=K``
    they are (K, C), a slot per time step, and ``num_batches_tracked`` is (K,).
    """

    running_var: Tensor | None
    compiled_at_test_time = True
    _ranks: Pool = EVERYBODY
    """Those that ``sync`` pools over."""

    def __init__(
        self,
        channels: int,
        *,
        per_step: bool = False,
        inside: bool = False,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
        time_steps: int | None = None,
        sync: bool = False,
        process_group: Any = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__(channels, device=device, dtype=dtype, **options)
        self.per_step, self.inside, self.momentum = per_step, inside, momentum
        self.time_steps, self.sync = time_steps, sync
        if process_group is not None:
            self._ranks = Pool(process_group)
        slots = () if time_steps is None else (time_steps,)
        buffers = {
            "running_mean": torch.zeros(*slots, channels, device=device, dtype=dtype),
            "running_var": torch.ones(*slots, channels, device=device, dtype=dtype),
            "num_batches_tracked": torch.zeros(slots, dtype=torch.long, device=device),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value if track_running_stats else None)

    def reset_running_stats(self) -> None:
        for name, buffer in self.named_buffers(recurse=False):
            buffer.fill_(1 if name.startswith("running_var") else 0)

    def extra_repr(self) -> str:
        kind = "per step" if self.per_step else "sequence-wise"
        slots = "" if self.time_steps is None else f", time_steps={self.time_steps}"
        return f"{self.channels}, {kind}, eps={self.eps}, momentum={self.momentum}{slots}"

    def forward(self, rows: Tensor, steps: Steps) -> Tensor:
        """Normalises rows (N, C)."""
        if isinstance(steps, Traced) and steps.batch_sizes is not None:
            raise RuntimeError(
                "a compiled graph cannot run hooks of a normaliser on a ragged batch: remove the "
                "hooks, or run the layer eagerly"
            )
        mode = self.mode
        if mode.population is not None and not mode.batch:
            mode.population.add(measure(rows.detach(), self._groups(steps))[0])
        out, measured = input_norm(self._input_norm(steps), steps, rows, self._ranks)
        if measured is not None:
            self.observe(measured)
        return out

    def plug(self, steps: Steps) -> Plug | None:
        mode = self.mode
        if self.inside:
            batch, fixed = self._by_batch(steps), self.test_statistics(steps.time)
            return StepNorm(self.weight, self.bias, self.eps, batch, fixed)
        if watched(self) or (mode.population is not None and not mode.batch):
            return None
        if self.meets_others:
            return None  # the ranks meet between the statistics and the loop
        return self._input_norm(steps)

    def _input_norm(self, steps: Steps) -> InputNorm:
        batch = self._by_batch(steps)
        needed = not batch or self.per_step or steps.may_be_lone(self.per_step)
        fixed = self.test_statistics(steps.time) if needed else None
        meets = self.meets_others
        return InputNorm(self.weight, self.bias, self.eps, self.per_step, batch, fixed, meets)

    @property
    def _inputs(self) -> int:
        """How many channels, the first ones, have frame-wise statistics of W_x x: a time step whose
        rows are all equal there is normalised with the running ones and updates nothing."""
        return self.channels if self.per_step and not self.inside else 0

    @property
    def meets_others(self) -> bool:
        return self.mode.batch and synchronised(self.sync, self._ranks)

    def _groups(self, steps: Steps) -> Groups:
        return Groups.frame(steps) if self.per_step else Groups.sequence(steps)

    def _by_batch(self, steps: Steps) -> bool:
        return self.mode.batch and not self.is_alone(steps)

    def is_alone(self, steps: Steps) -> bool:
        if steps.batch > 1 or (steps.rows > 1 and not self.per_step):
            return False
        mode = self.mode
        # Other ranks may have more rows, and populations are made of single ones too.
        if not mode.batch or mode.population is not None or self.meets_others:
            return False
        if self.num_batches_tracked is None or self.never_updated:
            where = "sequence in at least one time step" if self.per_step else "unpadded frame"
            raise ValueError(
                f"normalising with batch statistics needs more than one row: more than one {where}"
                ", got 1, and no running statistics were ever tracked to use instead: begin with a "
                "larger batch, or use norm='layer', which needs no other rows"
            )
        return True

    def test_statistics(self, steps: int) -> Fixed | None:
        """Mean and variance (1, C), or (steps, C) with slots; None without running statistics."""
        if self.running_mean is None:
            return None
        mean, var = self._kept()
        if self.time_steps is None:
            return mean[None], var[None]
        assert self.num_batches_tracked is not None
        slots = slots_for(self.num_batches_tracked, steps)
        return mean[slots], var[slots]

    def _kept(self) -> Fixed:
        """All running means and variances, each (…, C)."""
        assert self.running_mean is not None
        assert self.running_var is not None
        return self.running_mean, self.running_var

    def observe(self, batch: Statistics) -> None:
        """Takes the statistics of a batch to where the mode says."""
        mode = self.mode
        if mode.population is not None:
            mode.population.add(batch)
        elif mode.update:
            update = update_shared_ if self.time_steps is None else update_steps_
            with self._running() as (mean, var, tracked):
                update(mean, var, tracked, batch, self.momentum, self._inputs)

    @contextmanager
    def _running(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The same and their counts, to be changed."""
        assert self.num_batches_tracked is not None
        yield *self._kept(), self.num_batches_tracked

    def share(self) -> None:
        """One slot for all time steps instead of one each, to be filled by ``adopt``."""
        self.time_steps = None
        with torch.inference_mode(False):  # to be trained afterwards
            for name, buffer in list(self.named_buffers(recurse=False)):
                setattr(self, name, torch.zeros_like(buffer[0]))

    def population(self, shared: bool = False) -> Population:
        slots = None if shared else self.time_steps
        return Population(slots, self._inputs, by_step=self.per_step and not shared)

    @torch.no_grad()
    def adopt(self, population: Population) -> None:
        """Makes population statistics the running ones."""
        if self.running_mean is None or not population.batches:
            return
        with self._running() as (mean, var, tracked):
            enough = population.enough.to(mean.device)
            for buffer, value in ((mean, population.mean), (var, population.var)):
                value = value.to(buffer).reshape(buffer.shape)
                buffer.copy_(torch.where(enough.view_as(buffer), value, buffer))
            seen = enough.any(1).view_as(tracked)
            tracked.copy_(torch.where(seen, population.batches, tracked))

    @torch.no_grad()
    def start_neutral(self) -> None:
        """γ and statistics such that the eval output is W_x x + β (shared statistics only)."""
        assert self.weight is not None
        assert self.running_var is not None
        self.reset_running_stats()
        self.weight.fill_(1)
        self.running_var.fill_(1 - self.eps)

    @torch.no_grad()
    def absorb(self, population: Population) -> None:
        """From neutral to these statistics without a change of the function.

        γ = √(σ² + ε), β = μ + b, with the biased σ² for γ and buffer alike: then the function
        is kept in eval mode, and in training on a batch that has these statistics.
        """
        assert self.weight is not None
        assert self.bias is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        mean, var = population.mean[0], population.biased_var[0]
        self.running_mean.copy_(mean)
        self.running_var.copy_(var)
        gamma, beta = unfold(self.bias.to(mean), mean, var, self.eps)
        self.weight.copy_(gamma)
        self.bias.copy_(beta)
        self.num_batches_tracked.fill_(population.batches)

    @property
    def is_fixed_map(self) -> bool:
        return self.is_fixed and self.time_steps is None

    @property
    def is_batch_map(self) -> bool:
        mode, by_step = self.mode, self.per_step or self.inside
        return mode.batch and mode.population is None and not by_step and not self.sync

    def folded(self, weights: Weights) -> Weights:
        """Plain weights of the same eval output; statistics must be shared over time."""
        fixed = self.test_statistics(1)
        assert fixed is not None
        how = fold_inside if self.inside else fold
        return how(weights, self.weight, self.bias, fixed, self.eps)
