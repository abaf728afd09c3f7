"""What every normaliser offers the layers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normrnn.nn.loading import CONVERT, Hinting
from normrnn.ops.call import Plug
from normrnn.ops.fold import Weights
from normrnn.ops.statistics import Statistics
from normrnn.ops.steps import Steps

OTHERS = {"hidden", "per_step", "inside", "momentum", "track_running_stats", "time_steps", "sync"}
OTHERS |= {"cell_norm", "inputs", "shrinkage", "process_group"}
"""What the layers give every normaliser, needed or not."""


class GateNorm(Hinting):
    """γ and β over the C = G·H gate inputs of one layer and direction, and nothing else yet.

    A normalisation of the input transition overrides ``forward``; one that acts inside the steps,
    or that a kernel knows, gives a ``plug``. Arguments that one does not need, as ``momentum`` of
    one without statistics, it ignores, so that all are made alike.

    Shapes: ``weight`` (γ) and ``bias`` (β) are (C,).
    """

    weight: Tensor | None
    bias: Tensor | None
    compiled_at_test_time = False
    """Whether the compiled recurrence takes its statistics of test time as they are."""
    needs_eigenvectors = False
    """Whether a graph of it needs eigenvectors, which ONNX has not."""

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
        if unknown := others.keys() - OTHERS:
            raise TypeError(f"{type(self).__name__} got an unexpected argument {min(unknown)!r}")
        self.channels, self.eps, self.gamma = channels, eps, gamma
        self._vector("weight", channels, affine, device, dtype)
        self._vector("bias", channels, affine and bias, device, dtype)

    def _vector(self, name: str, size: int, wanted: bool, device: Any, dtype: Any) -> None:
        """A parameter that starts, as all of them, at γ's or β's initial value; or None."""
        start = 0.0 if name.startswith("bias") else self.gamma
        value = nn.Parameter(torch.full((size,), start, device=device, dtype=dtype))
        self.register_parameter(name, value if wanted else None)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """γ to its initial value, β to 0."""
        for name, parameter in self.named_parameters(recurse=False):
            parameter.fill_(0.0 if name.startswith("bias") else self.gamma)

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}"

    def _hint(self, state_dict: Mapping[str, Any], prefix: str) -> str:
        given = any(key.startswith(prefix) for key in state_dict)
        return CONVERT if prefix.endswith(("norm_l0.", "norm.")) and not given else ""

    def forward(self, rows: Tensor, steps: Steps) -> Tensor:
        """Normalises gate inputs (N, C) before the recurrence."""
        raise NotImplementedError(f"{type(self).__name__} acts inside the recurrence")

    def plug(self, steps: Steps) -> Plug | None:  # noqa: ARG002
        """What the recurrence itself does; None: ``forward`` has to be called."""
        return None

    def mapped(
        self,
        rows: Tensor,  # noqa: ARG002
        steps: Steps,  # noqa: ARG002
        weights: Weights,  # noqa: ARG002
        known: dict[Any, Any],  # noqa: ARG002
    ) -> Weights | None:
        """Plain weights that do to these rows (N, I) what the normalisation does; None: it is no
        such map. Directions of a layer share ``known``."""
        return None

    def observe(self, batch: Statistics) -> None:
        """Takes the statistics that the recurrence measured."""

    def is_alone(self, steps: Steps) -> bool:  # noqa: ARG002
        """Whether batch statistics were wanted, and every one would be that of a single row."""
        return False

    @property
    def meets_others(self) -> bool:
        """Whether the next pass pools its statistics with other ranks."""
        return False

    @property
    def never_updated(self) -> bool:
        """Whether it keeps statistics, and they are still those it began with."""
        return False

    @property
    def is_fixed(self) -> bool:
        """Whether the next pass neither uses nor measures the statistics of the batch."""
        return True

    @property
    def is_fixed_map(self) -> bool:
        """Whether the next pass is that of plain weights, those of ``folded``."""
        return False

    @property
    def is_batch_map(self) -> bool:
        """The same, of weights that depend on the batch."""
        return False

    def folded(self, weights: Weights) -> Weights:
        """Plain weights of the same eval output."""
        raise NotImplementedError(f"{type(self).__name__} does not fold")


class OfBothTransitions(GateNorm):
    """With a γ of its own for W_h h and, with ``cell_norm``, γ and β of the LSTM's c.

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
        self._vector("gamma_hh", channels, affine, *where)
        self._vector("weight_c", hidden, affine and cell_norm, *where)
        self._vector("bias_c", hidden, affine and bias and cell_norm, *where)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{', cell_norm=True' if self.cell_norm else ''}"


def watched(module: nn.Module) -> bool:
    """Whether somebody waits for what its ``forward`` returns."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or nn.modules.module._global_forward_hooks
        or nn.modules.module._global_forward_pre_hooks
    )
