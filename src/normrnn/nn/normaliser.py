"""γ, β and the statistics of test time, for one layer and direction."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from normrnn.ops.fold import fold, unfold
from normrnn.ops.hidden import StepNormaliser
from normrnn.ops.normalise import Fixed, column_statistics, normalise
from normrnn.ops.running import Population, slots_for, update_shared_, update_steps_
from normrnn.ops.statistics import Groups, Statistics
from normrnn.ops.steps import Steps


class Normaliser(nn.Module):
    """Batch normalisation of C channels over rows, sequence-wise or step by step.

    In training it uses the batch's statistics and updates the running ones; in eval mode it
    uses the running ones (the batch's own if there are none, as torch's BatchNorm does).

    Shapes: ``weight`` (γ) and ``bias`` (β) are (C,). Without ``time_steps`` the buffers
    ``running_mean`` and ``running_var`` are (C,) and shared over time; with ``time_steps=K``
    they are (K, C), a slot per time step, and ``num_batches_tracked`` is (K,).
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        channels: int,
        *,
        per_step: bool = False,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        bias: bool = True,
        track_running_stats: bool = True,
        gamma: float = 1.0,
        time_steps: int | None = None,
        sync: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.channels, self.per_step, self.eps, self.momentum = channels, per_step, eps, momentum
        self.gamma, self.time_steps, self.sync = gamma, time_steps, sync
        factory = {"device": device, "dtype": dtype}
        vector = torch.empty(channels, **factory)
        self.register_parameter("weight", nn.Parameter(vector.clone()) if affine else None)
        self.register_parameter("bias", nn.Parameter(vector.clone()) if affine and bias else None)
        slots = () if time_steps is None else (time_steps,)
        buffers = {
            "running_mean": torch.zeros(*slots, channels, **factory),
            "running_var": torch.ones(*slots, channels, **factory),
            "num_batches_tracked": torch.zeros(slots, dtype=torch.long, device=device),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value if track_running_stats else None)
        self._from_batch = False
        self._population: Population | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """γ to its initial value, β to 0, statistics forgotten."""
        if self.weight is not None:
            self.weight.fill_(self.gamma)
        if self.bias is not None:
            self.bias.zero_()
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
    def uses_batch(self) -> bool:
        """Whether the next forward pass normalises with the batch's own statistics."""
        return self.training or self._from_batch or self.running_mean is None

    @property
    def is_collecting(self) -> bool:
        """Whether statistics go to a population (see ``recalibrate``)."""
        return self._population is not None

    def forward(self, pre: Tensor, steps: Steps, dtype: torch.dtype | None = None) -> Tensor:
        """Normalises columns (C, N)."""
        groups = Groups.frame(steps) if self._by_step else Groups.sequence(steps)
        if self._population is not None and not self.uses_batch:
            self._population.add(column_statistics(pre.detach(), groups))
        out, batch = normalise(
            pre,
            self.weight,
            self.bias,
            groups,
            eps=self.eps,
            fixed=self.test_statistics(len(groups)),
            batch=self.uses_batch,
            lenient=self._population is not None,
            sync=self.sync,
            dtype=dtype,
        )
        self.observe(batch)
        return out

    def step_normaliser(self, steps: Steps) -> StepNormaliser:
        """The same, for the inside of a recurrence; give its statistics to ``observe``."""
        return StepNormaliser(
            self.weight,
            self.bias,
            steps,
            eps=self.eps,
            fixed=self.test_statistics(len(steps)),
            batch=self.uses_batch,
            lenient=self._population is not None,
        )

    @property
    def _by_step(self) -> bool:
        """Shared statistics of test time are the same at every step: one group will do."""
        return self.per_step and (self.uses_batch or self.time_steps is not None)

    def test_statistics(self, steps: int) -> Fixed | None:
        """Mean and variance (C, 1), or (C, steps) with slots; None without running statistics."""
        if self.running_mean is None or self.running_var is None:
            return None
        if self.time_steps is None:
            return self.running_mean.unsqueeze(1), self.running_var.unsqueeze(1)
        assert self.num_batches_tracked is not None
        slots = slots_for(self.num_batches_tracked, steps)
        return self.running_mean[slots].t(), self.running_var[slots].t()

    @torch.no_grad()
    def observe(self, batch: Statistics) -> None:
        """Takes the statistics of a batch to the running ones, if this is training."""
        if not self.uses_batch:
            return
        if self._population is not None:
            self._population.add(batch)
        elif self.training and self.running_mean is not None:
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            update = update_shared_ if self.time_steps is None else update_steps_
            buffers = self.running_mean, self.running_var, self.num_batches_tracked
            update(*buffers, batch, self.momentum)

    @contextmanager
    def from_batch(self) -> Iterator[None]:
        """Batch statistics whatever the mode; in eval mode nothing is updated."""
        before, self._from_batch = self._from_batch, True
        try:
            yield
        finally:
            self._from_batch = before

    @contextmanager
    def collecting(self, use: bool = True) -> Iterator[Population]:
        """Gathers batch statistics into a population; ``use``: and normalises with them."""
        self._population = Population(1 if self.time_steps is None else self.time_steps)
        try:
            with self.from_batch() if use else nullcontext():
                yield self._population
        finally:
            self._population = None

    @torch.no_grad()
    def adopt(self, population: Population) -> None:
        """Makes population statistics the running ones."""
        if self.running_mean is None or self.running_var is None or not population.batches:
            return
        assert self.num_batches_tracked is not None
        enough = population.enough.to(self.running_mean.device)
        pairs = (self.running_mean, population.mean), (self.running_var, population.var)
        for buffer, value in pairs:
            value = value.t().to(buffer).reshape(buffer.shape)
            buffer.copy_(torch.where(enough.view(*buffer.shape[:-1], 1), value, buffer))
        tracked = self.num_batches_tracked
        tracked.copy_(torch.where(enough.view_as(tracked), population.batches, tracked))

    @torch.no_grad()
    def start_neutral(self, bias: Tensor) -> None:
        """γ, β and statistics such that the eval output is W_x x + b (shared statistics only)."""
        assert self.weight is not None
        assert self.bias is not None
        assert self.running_mean is not None
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
        mean, var = population.mean[:, 0], population.biased_var[:, 0]
        self.running_mean.copy_(mean)
        self.running_var.copy_(var)
        gamma, beta = unfold(self.bias.to(mean), mean, var, self.eps)
        self.weight.copy_(gamma)
        self.bias.copy_(beta)
        self.num_batches_tracked.fill_(population.batches)

    def folded(self, w_ih: Tensor) -> tuple[Tensor, Tensor]:
        """W′ and b′ of the same eval output; statistics must be shared over time."""
        assert self.running_mean is not None
        assert self.running_var is not None
        return fold(w_ih, self.weight, self.bias, self.running_mean, self.running_var, self.eps)
