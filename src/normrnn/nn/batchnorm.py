"""Batch normalisation of the input transition or of the sums inside the steps.

Also the state that normalisers with statistics share: running ones, and the modes that
``recalibrate`` and ``batch_statistics`` request.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from normrnn.nn import tracing
from normrnn.nn.normaliser import TEST, TRAIN, GateNorm, Mode, Resolved
from normrnn.ops.call import Norm, Weights
from normrnn.ops.fold import fold_input, fold_sums, unfold
from normrnn.ops.layout import Steps, Traced
from normrnn.ops.normalise import normalise_input
from normrnn.ops.running import ENOUGH_ROWS, Population, slots_for, update_running_
from normrnn.ops.statistics import Given, Groups, Statistics, measure
from normrnn.ops.sync import DEFAULT_POOL, Pool


class StatisticalNorm(GateNorm):
    """A normaliser that keeps statistics for test time.

    In training it uses the batch's statistics and updates the running ones; in eval mode it uses
    the running ones (the batch's own if there are none, as torch's BatchNorm does).
    """

    running_mean: Tensor | None
    num_batches_tracked: Tensor | None
    time_steps: int | None = None

    def reset_parameters(self) -> None:
        """Reset γ to its initial value, β to 0, and the statistics."""
        super().reset_parameters()
        self.reset_running_stats()

    def reset_running_stats(self) -> None:
        """Reset to mean 0 and variance 1."""
        raise NotImplementedError

    @property
    def mode(self) -> Mode:
        """What the next forward pass does with statistics."""
        mode = TRAIN if self.training else TEST
        if _active:
            mode = _requested.get().get(self, mode)
        if self.running_mean is None:
            mode = mode._replace(batch=True, update=False)
        return mode

    @property
    def is_fixed(self) -> bool:
        mode = self.mode
        return not mode.batch and mode.population is None

    @property
    def was_never_updated(self) -> bool:
        tracked = self.num_batches_tracked
        if tracked is None or tracked.is_meta or torch.compiler.is_compiling():
            return False  # a graph cannot depend on the values of a buffer
        return not bool(tracked.any())

    def population(self, shared: bool = False) -> Any:
        """Return an empty population for these statistics; ``shared``: all time steps as one."""
        raise NotImplementedError

    def share(self) -> None:
        """Replace slots per time step by one for all, to be filled by ``adopt``."""
        raise NotImplementedError

    def adopt(self, population: Any) -> None:
        """Make population statistics the running ones."""
        raise NotImplementedError


def has_hooks(module: nn.Module) -> bool:
    """Whether a forward or backward hook expects ``forward`` to be called."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


# The modes that `batch_statistics` and `recalibrate` request are private to a thread: another
# thread that runs the same model does not see them. Compilers do not read context variables, so
# compiled models run eagerly while any mode is requested.
_requested: ContextVar[Mapping[nn.Module, Mode]] = ContextVar("modes", default={})  # noqa: B039
_active = 0
"""Requests in all threads."""
_compile_again: Callable[[], Any] | None = None
_lock = Lock()


@contextmanager
def requesting(modes: Mapping[nn.Module, Mode]) -> Iterator[None]:
    """Run these normalisers in these modes, in this thread."""
    token = _requested.set({**_requested.get(), **modes})
    _begin()
    try:
        yield
    finally:
        _end()
        _requested.reset(token)


def _begin() -> None:
    global _active, _compile_again
    with _lock:
        if _compile_again is None:
            _compile_again = tracing.run_eagerly()
        _active += 1


def _end() -> None:
    global _active, _compile_again
    with _lock:
        _active -= 1
        if not _active and _compile_again is not None:
            again, _compile_again = _compile_again, None
            again()


@contextmanager
def collecting(
    normalisers: Sequence[StatisticalNorm], use: bool = True, shared: bool = False
) -> Iterator[list[Any]]:
    """Accumulate batch statistics in populations.

    Args:
        use: also normalise with them.
        shared: all time steps as one, also where there is a slot for each.
    """
    populations = [n.population(shared) for n in normalisers]
    modes = [Mode(batch=use, population=p) for p in populations]
    with requesting(dict(zip(normalisers, modes, strict=True))):
        yield populations


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
        self.time_steps, self.sync, self.runs_hooks = time_steps, sync, not inside
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
        is_measured_apart = mode.population is not None and not mode.batch
        needs_call = pool is not None or is_measured_apart or has_hooks(self)
        return Resolved(mode, is_single_row, False, needs_call and not self.inside, pool)

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
            mean, var = self.given_statistics(resolved.mode, steps.time) or (None, None)
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

    def test_statistics(self, steps: int, population: Population | None = None) -> Given | None:
        """Return mean and variance (1, C), or (steps, C) with slots; None if there are none. Those
        of a ``population`` come first, where it has some."""
        if self.running_mean is None:
            return None
        mean, var, tracked = self._merged(population, ENOUGH_ROWS)
        if self.time_steps is None:
            return mean[None], var[None]
        slots = slots_for(tracked, steps)
        return mean[slots], var[slots]

    def given_statistics(self, mode: Mode, steps: int) -> Given | None:
        """Return what normalises steps without variance of their own.

        While a population is gathered, it is that population as far as it is known: statistics
        inside the recurrence depend on these steps, and must be those that eval mode will see.
        """
        return self.test_statistics(steps, mode.population if mode.batch else None)

    def _merged(self, population: Population | None, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return running means, variances and counts, replaced where a population has statistics of
        so many rows."""
        (mean, var), tracked = self._buffers_of_statistics(), self.num_batches_tracked
        assert tracked is not None
        if population is None or not population.batches:
            return mean, var, tracked
        enough = population.enough(rows).to(mean.device)
        mean, var = (
            torch.where(enough, new.to(old), old.view(-1, old.shape[-1])).view_as(old)
            for old, new in ((mean, population.mean), (var, population.var))
        )
        count = torch.where(enough.any(1), population.batches, tracked.view(-1)).view_as(tracked)
        return mean, var, count

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
        merged = self._merged(population, 2)
        with self._changing() as buffers:
            for buffer, value in zip(buffers, merged, strict=True):
                buffer.copy_(value)

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
