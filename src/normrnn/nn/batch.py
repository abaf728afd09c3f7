"""Batch statistics, on the input transition or inside the steps, and those of test time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normrnn.nn.mode import BATCH, TEST, TRAIN, Mode, asked_of, asking
from normrnn.nn.normaliser import GateNorm, watched
from normrnn.ops.call import InputNorm, Plug, StepNorm
from normrnn.ops.fold import Weights, fold, fold_inside, unfold
from normrnn.ops.loop import input_norm
from normrnn.ops.normalise import Fixed
from normrnn.ops.running import Population, slots_for, update_shared_, update_steps_
from normrnn.ops.statistics import Groups, Statistics, measure, synchronised
from normrnn.ops.steps import Steps


class Normaliser(GateNorm):
    """Batch normalisation of C channels over rows, sequence-wise or step by step.

    In training it uses the batch's statistics and updates the running ones; in eval mode it
    uses the running ones (the batch's own if there are none, as torch's BatchNorm does).

    Shapes: ``weight`` (γ) and ``bias`` (β) are (C,). Without ``time_steps`` the buffers
    ``running_mean`` and ``running_var`` are (C,) and shared over time; with ``time_steps=K``
    they are (K, C), a slot per time step, and ``num_batches_tracked`` is (K,).
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

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
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__(channels, device=device, dtype=dtype, **options)
        self.per_step, self.inside, self.momentum = per_step, inside, momentum
        self.time_steps, self.sync = time_steps, sync
        slots = () if time_steps is None else (time_steps,)
        buffers = {
            "running_mean": torch.zeros(*slots, channels, device=device, dtype=dtype),
            "running_var": torch.ones(*slots, channels, device=device, dtype=dtype),
            "num_batches_tracked": torch.zeros(slots, dtype=torch.long, device=device),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value if track_running_stats else None)

    def reset_parameters(self) -> None:
        """γ to its initial value, β to 0, statistics forgotten."""
        super().reset_parameters()
        self.reset_running_stats()

    def reset_running_stats(self) -> None:
        if self.running_mean is not None and self.running_var is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.zero_()

    def extra_repr(self) -> str:
        kind = "per step" if self.per_step else "sequence-wise"
        slots = "" if self.time_steps is None else f", time_steps={self.time_steps}"
        return f"{self.channels}, {kind}, eps={self.eps}, momentum={self.momentum}{slots}"

    @property
    def mode(self) -> Mode:
        """What the next forward pass does with statistics."""
        mode = asked_of(self) or (TRAIN if self.training else TEST)
        if self.running_mean is None:
            mode = replace(mode, batch=True, update=False)
        return mode

    def forward(self, rows: Tensor, steps: Steps) -> Tensor:
        """Normalises rows (N, C)."""
        mode = self.mode
        if mode.population is not None and not mode.batch:
            mode.population.add(measure(rows.detach(), self._groups(steps))[0])
        out, measured = input_norm(self._input_norm(steps), steps, rows)
        if measured is not None:
            self.observe(measured)
        return out

    def plug(self, steps: Steps) -> Plug | None:
        mode = self.mode
        if self.inside:
            self.check_rows(steps)
            fixed = self.test_statistics(len(steps))
            return StepNorm(self.weight, self.bias, self.eps, mode.batch, fixed)
        if watched(self) or (mode.population is not None and not mode.batch):
            return None
        if mode.batch and synchronised(self.sync):
            return None  # the ranks meet between the statistics and the loop
        return self._input_norm(steps)

    def _input_norm(self, steps: Steps) -> InputNorm:
        if steps.rows == 1 or steps.batch == 1:
            self.check_rows(steps)
        return InputNorm(
            self.weight,
            self.bias,
            self.eps,
            self.per_step,
            self.mode.batch,
            self.test_statistics(len(steps)),
            self.sync,
        )

    def _groups(self, steps: Steps) -> Groups:
        return Groups.frame(steps) if self.per_step else Groups.sequence(steps)

    def check_rows(self, steps: Steps) -> None:
        """ValueError if every mean of the batch would be that of one row."""
        mode = self.mode
        rows = steps.batch if self.per_step else steps.rows
        # Other ranks may have more, and populations are made of single rows too.
        alone = rows == 1 and not synchronised(self.sync) and mode.population is None
        if mode.batch and alone:
            where = "sequence in at least one time step" if self.per_step else "unpadded frame"
            raise ValueError(
                f"normalising with batch statistics needs more than one row: more than one {where}"
                ", got 1; use a larger batch, or eval() mode for running statistics"
            )

    def test_statistics(self, steps: int) -> Fixed | None:
        """Mean and variance (1, C), or (steps, C) with slots; None without running statistics."""
        if self.running_mean is None or self.running_var is None:
            return None
        if self.time_steps is None:
            return self.running_mean[None], self.running_var[None]
        assert self.num_batches_tracked is not None
        slots = slots_for(self.num_batches_tracked, steps)
        return self.running_mean[slots], self.running_var[slots]

    @torch.no_grad()
    def observe(self, batch: Statistics) -> None:
        """Takes the statistics of a batch to where the mode says."""
        mode = self.mode
        if mode.population is not None:
            mode.population.add(batch)
        elif mode.update:
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            update = update_shared_ if self.time_steps is None else update_steps_
            buffers = self.running_mean, self.running_var, self.num_batches_tracked
            update(*buffers, batch, self.momentum)

    def population(self) -> Population:
        """An empty one with room for these statistics."""
        return Population(1 if self.time_steps is None else self.time_steps)

    @torch.no_grad()
    def adopt(self, population: Population) -> None:
        """Makes population statistics the running ones."""
        if self.running_mean is None or self.running_var is None or not population.batches:
            return
        assert self.num_batches_tracked is not None
        enough = population.enough.to(self.running_mean.device)
        pairs = (self.running_mean, population.mean), (self.running_var, population.var)
        for buffer, value in pairs:
            value = value.to(buffer).reshape(buffer.shape)
            buffer.copy_(torch.where(enough.view(*buffer.shape[:-1], 1), value, buffer))
        tracked = self.num_batches_tracked
        tracked.copy_(torch.where(enough.view_as(tracked), population.batches, tracked))

    @torch.no_grad()
    def start_neutral(self, bias: Tensor) -> None:
        """γ, β and statistics such that the eval output is W_x x + b (shared statistics only)."""
        assert self.weight is not None
        assert self.bias is not None
        assert self.running_var is not None
        self.reset_parameters()
        self.weight.fill_(1)
        self.bias.copy_(bias)
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
        mode = self.mode
        return not mode.batch and mode.population is None and self.time_steps is None

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


@contextmanager
def by_batch(normalisers: list[Normaliser]) -> Iterator[None]:
    """Batch statistics whatever the mode; nothing is updated."""
    with asking(dict.fromkeys(normalisers, BATCH)):
        yield


@contextmanager
def collecting(normalisers: list[Normaliser], use: bool = True) -> Iterator[list[Population]]:
    """Gathers batch statistics into populations; ``use``: and normalises with them."""
    populations = [n.population() for n in normalisers]
    modes = [Mode(batch=use, population=p) for p in populations]
    with asking(dict(zip(normalisers, modes, strict=True))):
        yield populations
