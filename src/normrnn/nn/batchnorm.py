"""Batch normalisation: of the input transition, inside the steps, or of both transitions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from normrnn.nn.normaliser import (
    Mode,
    Resolved,
    StatisticalNorm,
    TransitionsNorm,
    has_forward_hooks,
)
from normrnn.ops.call import Norm, Weights
from normrnn.ops.fold import fold_input, fold_recurrent, fold_sums, unfold
from normrnn.ops.layout import Steps, Traced
from normrnn.ops.loop import normalise_input
from normrnn.ops.running import Population, slots_for, store_, update_running_
from normrnn.ops.statistics import Given, Groups, Statistics, measure
from normrnn.ops.sync import DEFAULT_POOL, Pool


class Normaliser(StatisticalNorm):
    """Batch normalisation of C channels over rows, sequence-wise or step by step.

    Shapes: ``weight`` (γ) and ``bias`` (β) are (C,). Without ``time_steps`` the buffers
    ``running_mean`` and ``running_var`` are (C,) and shared over time; with ``time_steps=K``
    they are (K, C), a slot per time step, and ``num_batches_tracked`` is (K,).
    """

    running_var: Tensor | None
    _pool: Pool = DEFAULT_POOL
    """The ranks that ``sync`` pools over."""

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
        # Channels, the first ones, with frame-wise statistics of W_x x: a time step whose rows are
        # all equal there is normalised with the running ones and updates nothing.
        self._frame_wise = channels if per_step and not inside else 0
        if process_group is not None:
            self._pool = Pool(process_group)
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

    def resolve(self, steps: Steps) -> Resolved:
        mode, pool, is_single_row = self.mode, None, False
        if mode.batch:
            if self.sync and self.waits_for_ranks:
                pool = self._pool  # other ranks may have more rows
            elif not (steps.batch > 1 or (steps.rows > 1 and not self.per_step)):
                is_single_row = mode.population is None
        if is_single_row:
            self._check_running()
            mode = mode._replace(batch=False)
        has_hooks = has_forward_hooks(self)
        if mode.batch:
            needs_call = has_hooks or pool is not None
        else:
            needs_call = has_hooks or mode.population is not None
        needs_call = needs_call and not self.inside
        return Resolved(mode, is_single_row, False, needs_call, pool)

    @property
    def waits_for_ranks(self) -> bool:
        return self.sync and self.mode.batch and self._pool.has_others

    def _check_running(self) -> None:
        """ValueError if a single row cannot be normalised with running statistics."""
        if self.num_batches_tracked is None or self.was_never_updated:
            where = "sequence in at least one time step" if self.per_step else "unpadded frame"
            raise ValueError(
                f"normalising with batch statistics needs more than one row: more than one {where}"
                ", got 1, and no running statistics were ever tracked to use instead: begin with a "
                "larger batch, or use norm='layer', which needs no other rows"
            )

    def norm(self, resolved: Resolved, steps: Steps) -> Norm:
        mean = var = None
        batch, per_step = resolved.mode.batch, self.per_step
        if not batch or per_step or steps.has_single_row(per_step):
            mean, var = self.test_statistics(steps.time) or (None, None)
        kind, none = "step" if self.inside else "input", None
        static = kind, self.eps, per_step, batch, False
        return Norm(*static, self.weight, self.bias, none, none, none, mean, var)

    def forward(self, rows: Tensor, steps: Steps) -> Tensor:
        """Normalise rows (N, C)."""
        if isinstance(steps, Traced) and steps.batch_sizes is not None:
            raise RuntimeError(
                "a compiled graph cannot run hooks of a normaliser on a ragged batch: remove the "
                "hooks, or run the layer eagerly"
            )
        resolved = self.resolve(steps)
        mode = resolved.mode
        if mode.population is not None and not mode.batch:
            groups = Groups.frame(steps) if self.per_step else Groups.sequence(steps)
            mode.population.add(measure(rows.detach(), groups)[0])
        norm = self.norm(resolved, steps)
        out, measured = normalise_input(norm, steps, rows, resolved.pool)
        if measured is not None:
            self.observe(mode, measured)
        return out

    def folded(self, weights: Weights) -> Weights:
        """Return plain weights of the same eval output; statistics must be shared over time."""
        given = self.test_statistics(1)
        assert given is not None
        fold = fold_sums if self.inside else fold_input
        return fold(weights, self.weight, self.bias, given, self.eps)

    def test_statistics(self, steps: int) -> Given | None:
        """Return mean and variance (1, C), or (steps, C) with slots; None if there are none."""
        if self.running_mean is None:
            return None
        mean, var = self._buffers_of_statistics()
        if self.time_steps is None:
            return mean[None], var[None]
        assert self.num_batches_tracked is not None
        slots = slots_for(self.num_batches_tracked, steps)
        return mean[slots], var[slots]

    def _buffers_of_statistics(self) -> Given:
        """Return all running means and variances, each (…, C)."""
        assert self.running_mean is not None
        assert self.running_var is not None
        return self.running_mean, self.running_var

    def observe(self, mode: Mode, batch: Statistics) -> None:
        if mode.population is not None:
            mode.population.add(batch)
        elif mode.update:
            self._update(batch)

    def _update(self, batch: Statistics) -> None:
        mean, var, tracked = self.running_mean, self.running_var, self.num_batches_tracked
        assert mean is not None
        assert var is not None
        assert tracked is not None
        update_running_(mean, var, tracked, batch, self.momentum, self._frame_wise)

    def share(self) -> None:
        self.time_steps = None
        with torch.inference_mode(False):  # to be trained afterwards
            for name, buffer in list(self.named_buffers(recurse=False)):
                setattr(self, name, torch.zeros_like(buffer[0]))

    def population(self, shared: bool = False) -> Population:
        slots = None if shared else self.time_steps
        return Population(slots, self._frame_wise, per_step=self.per_step and not shared)

    @torch.no_grad()
    def adopt(self, population: Population) -> None:
        if self.running_mean is None or not population.batches:
            return
        with self._changing() as (mean, var, tracked):
            enough = population.enough.to(mean.device)
            for buffer, value in ((mean, population.mean), (var, population.var)):
                value = value.to(buffer).reshape(buffer.shape)
                buffer.copy_(torch.where(enough.view_as(buffer), value, buffer))
            seen = enough.any(1).view_as(tracked)
            tracked.copy_(torch.where(seen, population.batches, tracked))

    @contextmanager
    def _changing(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield running means and variances and their counts, to be changed."""
        assert self.num_batches_tracked is not None
        yield *self._buffers_of_statistics(), self.num_batches_tracked

    @torch.no_grad()
    def start_neutral(self) -> None:
        """Set γ and statistics such that the eval output is W_x x + β (shared statistics only)."""
        assert self.weight is not None
        assert self.running_var is not None
        self.reset_running_stats()
        self.weight.fill_(1)
        self.running_var.fill_(1 - self.eps)

    @torch.no_grad()
    def absorb(self, population: Population) -> None:
        """Change from neutral to these statistics without a change of the function.

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


class RecurrentNormaliser(TransitionsNorm, Normaliser):
    """BN(W_h h; γ_h) + BN(W_x x; γ_x) + β by the rows of each step (Cooijmans et al. 2016).

    Test statistics are those of :class:`Normaliser` for W_x x, the same with ``_hh`` for W_h h
    (C channels) and, with ``cell_norm``, with ``_c`` for c (H); one ``num_batches_tracked`` counts
    for all.
    """

    def __init__(self, channels: int, *, hidden: int, **options: Any):
        super().__init__(channels, hidden=hidden, **options)
        self._frame_wise = channels
        widths = (("_hh", channels), ("_c", hidden))[: 1 + self.cell_norm]
        for which, width in widths:
            for name in ("running_mean", "running_var"):
                like = getattr(self, name)
                value = None if like is None else like.new_empty(*like.shape[:-1], width)
                self.register_buffer(name + which, value)
        self.reset_running_stats()

    def norm(self, resolved: Resolved, steps: Steps) -> Norm:
        mean, var = self.test_statistics(steps.time) or (None, None)
        vectors = self.weight, self.bias, self.gamma_hh, self.weight_c, self.bias_c
        return Norm(
            "recurrent", self.eps, True, resolved.mode.batch, self.cell_norm, *vectors, mean, var
        )

    def test_statistics(self, steps: int) -> Given | None:
        given = super().test_statistics(steps)
        if given is None or self.time_steps is None:
            return given
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        # One count is for all parts, and a step with equal inputs updates W_h h and c alone.
        changed = (self.running_mean != 0) | (self.running_var != 1)
        slots = slots_for(self.num_batches_tracked * changed.any(1), steps)
        inputs = self.running_mean[slots], self.running_var[slots]
        mean, var = (
            torch.cat([own, every[:, self.channels :]], 1)
            for own, every in zip(inputs, given, strict=True)
        )
        return mean, var

    def _parts(self, name: str) -> list[Tensor]:
        """Return the buffers of that name: of W_x x, W_h h and, where it is normalised, c."""
        return [getattr(self, name + which) for which in ("", "_hh", "_c")[: 2 + self.cell_norm]]

    def _buffers_of_statistics(self) -> Given:
        """Side by side, so that one value that is not finite prevents the update of all."""
        return torch.cat(self._parts("running_mean"), -1), torch.cat(self._parts("running_var"), -1)

    def _update(self, batch: Statistics) -> None:
        with self._changing() as (mean, var, tracked):
            update_running_(mean, var, tracked, batch, self.momentum, self._frame_wise)

    @contextmanager
    def _changing(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        assert self.num_batches_tracked is not None
        mean, var = self._buffers_of_statistics()
        yield mean, var, self.num_batches_tracked
        for name, changed in (("running_mean", mean), ("running_var", var)):
            parts = self._parts(name)
            values = changed.split([part.shape[-1] for part in parts], -1)
            for part, value in zip(parts, values, strict=True):
                store_(part, value)

    def folded(self, weights: Weights) -> Weights:
        """Return plain weights of the same eval output; statistics must be shared over time."""
        given = self.test_statistics(1)
        assert given is not None
        return fold_recurrent(weights, self.weight, self.gamma_hh, self.bias, given, self.eps)
