"""What every normaliser offers the layers."""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
    runs_hooks = True
    """Whether ``forward`` is called where there are hooks."""
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

    def register_forward_hook(self, *args: Any, **options: Any) -> Any:
        self._warn_without_hooks()
        return super().register_forward_hook(*args, **options)

    def register_forward_pre_hook(self, *args: Any, **options: Any) -> Any:
        self._warn_without_hooks()
        return super().register_forward_pre_hook(*args, **options)

    def register_full_backward_hook(self, *args: Any, **options: Any) -> Any:
        self._warn_without_hooks()
        return super().register_full_backward_hook(*args, **options)

    def register_full_backward_pre_hook(self, *args: Any, **options: Any) -> Any:
        self._warn_without_hooks()
        return super().register_full_backward_pre_hook(*args, **options)

    def _warn_without_hooks(self) -> None:
        if not self.runs_hooks:
            warnings.warn(
                f"{type(self).__name__} acts inside the recurrence: this hook will not run; "
                "register it on the layer instead",
                stacklevel=3,
            )

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
        raise NotImplementedError(f"{type(self).__name__} does not change the weights")

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
