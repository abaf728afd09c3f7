"""Normalisation of both transitions, W_x x and W_h h: of every row, or over those of a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from normrnn.nn.batchnorm import Normaliser
from normrnn.nn.normaliser import GateNorm, Resolved
from normrnn.ops.call import Norm, Weights
from normrnn.ops.fold import fold_recurrent
from normrnn.ops.layout import Steps
from normrnn.ops.running import ENOUGH_ROWS, Population, slots_for, store_, update_running_
from normrnn.ops.statistics import Given, Statistics


class TransitionsNorm(GateNorm):
    """A γ for W_x x, another for W_h h and, with ``cell_norm``, γ and β of the LSTM's c.

    Shapes: ``weight`` (γ_x), ``gamma_hh`` (γ_h) and ``bias`` (β) are (C,); with ``cell_norm``
    ``weight_c`` and ``bias_c``, of c before tanh, (H,).
    """

    gamma_hh: Tensor | None
    weight_c: Tensor | None
    bias_c: Tensor | None
    runs_hooks = False

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


class LayerNormaliser(TransitionsNorm):
    """LN(W_x x; γ_x) + LN(W_h h; γ_h) + β over all C features; no statistics are kept."""

    kind = "row"

    def resolve(self, steps: Steps) -> Resolved:  # noqa: ARG002
        return Resolved()

    def norm(self, resolved: Resolved, steps: Steps) -> Norm:  # noqa: ARG002
        static = self.kind, self.eps, False, False, self.cell_norm
        return Norm(*static, self.weight, self.bias, self.gamma_hh, self.weight_c, self.bias_c)


class RMSNormaliser(LayerNormaliser):
    """The same with x / √(mean of x² + ε) instead of LN (Zhang & Sennrich 2019)."""

    kind = "rms"


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
        mean, var = self.given_statistics(resolved.mode, steps.time) or (None, None)
        vectors = self.weight, self.bias, self.gamma_hh, self.weight_c, self.bias_c
        return Norm(
            "recurrent", self.eps, True, resolved.mode.batch, self.cell_norm, *vectors, mean, var
        )

    def test_statistics(self, steps: int, population: Population | None = None) -> Given | None:
        given = super().test_statistics(steps, population)
        if given is None or self.time_steps is None:
            return given
        # One count is for all parts, and a step with equal inputs updates W_h h and c alone.
        mean, var, tracked = self._merged(population, ENOUGH_ROWS)
        mean, var = mean[:, : self.channels], var[:, : self.channels]
        slots = slots_for(tracked * ((mean != 0) | (var != 1)).any(1), steps)
        mean, var = (
            torch.cat([of_input[slots], every[:, self.channels :]], 1)
            for of_input, every in zip((mean, var), given, strict=True)
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
