"""What every normaliser offers the layers, and the statistics that a forward pass uses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from normrnn.nn import tracing
from normrnn.ops.call import Norm, Weights
from normrnn.ops.layout import Steps
from normrnn.ops.statistics import Statistics
from normrnn.ops.sync import Pool

_ALL_OPTIONS = {
    *("hidden", "per_step", "inside", "momentum", "track_running_stats", "time_steps", "sync"),
    *("cell_norm", "inputs", "shrinkage", "process_group"),
}
"""Options that the layers pass to every normaliser, needed or not."""


class Mode(NamedTuple):
    """What a forward pass does with statistics."""

    batch: bool
    """Normalise with the batch's own statistics; else with those of test time."""
    update: bool = False
    """Update the running statistics."""
    population: Any = None
    """Accumulate the batch's statistics here."""


TRAIN, BATCH, TEST = Mode(batch=True, update=True), Mode(batch=True), Mode(batch=False)


class Resolved(NamedTuple):
    """The state of a normaliser, resolved once per forward pass."""

    mode: Mode = TEST
    """With ``batch=False`` where every group of rows has a single row."""
    is_single_row: bool = False
    """Whether batch statistics are replaced by running ones, for lack of rows."""
    changes_weights: bool = False
    """Whether the pass is that of plain weights, see :meth:`GateNorm.change_weights`."""
    needs_call: bool = False
    """Whether ``forward`` has to be called, on gate inputs: for hooks, or ranks to pool over."""
    pool: Pool | None = None


class GateNorm(nn.Module):
    """γ and β over the C = G·H gate inputs of one layer and direction.

    A normalisation of the input transition overrides ``forward``. One that the recurrence knows
    overrides ``resolve`` and ``norm``; one that is a change of weights ``change_weights``. Options
    that a normaliser does not need, as ``momentum`` without statistics, it ignores.

    Shapes: ``weight`` (γ) and ``bias`` (β) are (C,).
    """

    weight: Tensor | None
    bias: Tensor | None
    needs_eigenvectors = False
    """Whether a graph of it needs eigenvectors, which ONNX does not have."""

    def __init__(
        self,
        channels: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        gamma: float = 1.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **others: Any,
    ):
        super().__init__()
        if unknown := others.keys() - _ALL_OPTIONS:
            raise TypeError(f"{type(self).__name__} got an unexpected argument {min(unknown)!r}")
        self.channels, self.eps, self.gamma = channels, eps, gamma
        self._add_vector("weight", channels, affine, device, dtype)
        self._add_vector("bias", channels, affine and bias, device, dtype)

    def _add_vector(self, name: str, size: int, wanted: bool, device: Any, dtype: Any) -> None:
        """Register a parameter with γ's or β's initial value, or None."""
        start = 0.0 if name.startswith("bias") else self.gamma
        value = nn.Parameter(torch.full((size,), start, device=device, dtype=dtype))
        self.register_parameter(name, value if wanted else None)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset γ to its initial value and β to 0."""
        for name, parameter in self.named_parameters(recurse=False):
            parameter.fill_(0.0 if name.startswith("bias") else self.gamma)

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}"

    def forward(self, rows: Tensor, steps: Steps) -> Tensor:
        """Normalise gate inputs (N, C) before the recurrence."""
        raise NotImplementedError(f"{type(self).__name__} acts inside the recurrence")

    def resolve(self, steps: Steps) -> Resolved:  # noqa: ARG002
        """Resolve what the next forward pass does."""
        return Resolved(needs_call=True)

    def norm(self, resolved: Resolved, steps: Steps) -> Norm:
        """Return the normalisation that the recurrence computes."""
        raise NotImplementedError

    def change_weights(
        self,
        resolved: Resolved,
        rows: Tensor,
        steps: Steps,
        weights: Weights,
        shared: dict[Any, Any],
    ) -> Weights:
        """Return plain weights that do to these rows (N, I) what the normalisation does.

        ``shared`` is for results that the directions of a layer have in common.
        """
        raise NotImplementedError(f"{type(self).__name__} is no change of weights")

    def folded(self, weights: Weights) -> Weights:
        """Return plain weights of the same eval output."""
        raise NotImplementedError(f"{type(self).__name__} does not fold")

    def observe(self, mode: Mode, batch: Statistics) -> None:
        """Take the statistics that the recurrence measured."""

    @property
    def waits_for_ranks(self) -> bool:
        """Whether the next pass pools its statistics with other ranks."""
        return False

    @property
    def was_never_updated(self) -> bool:
        """Whether it keeps statistics that still have their initial values."""
        return False

    @property
    def is_fixed(self) -> bool:
        """Whether the next pass neither uses nor measures the statistics of the batch."""
        return True


class TransitionsNorm(GateNorm):
    """A γ for W_x x, another for W_h h and, with ``cell_norm``, γ and β of the LSTM's c.

    Shapes: ``weight`` (γ_x), ``gamma_hh`` (γ_h) and ``bias`` (β) are (C,); with ``cell_norm``
    ``weight_c`` and ``bias_c``, of c before tanh, (H,).
    """

    gamma_hh: Tensor | None
    weight_c: Tensor | None
    bias_c: Tensor | None

    def __init__(
        self,
        channels: int,
        *,
        hidden: int,
        affine: bool = True,
        bias: bool = True,
        cell_norm: bool = False,
        **options: Any,
    ):
        super().__init__(channels, affine=affine, bias=bias, **options)
        self.cell_norm = cell_norm
        where = options.get("device"), options.get("dtype")
        self._add_vector("gamma_hh", channels, affine, *where)
        self._add_vector("weight_c", hidden, affine and cell_norm, *where)
        self._add_vector("bias_c", hidden, affine and bias and cell_norm, *where)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{', cell_norm=True' if self.cell_norm else ''}"


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


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a hook expects ``forward`` to be called."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
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
