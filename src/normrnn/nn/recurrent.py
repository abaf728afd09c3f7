"""Batch normalisation of both transitions, each step by itself, and of the cell."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from normrnn.nn.batch import Normaliser
from normrnn.nn.normaliser import OfBothTransitions
from normrnn.ops.call import RecurrentNorm
from normrnn.ops.fold import Weights, fold_recurrent
from normrnn.ops.normalise import Fixed
from normrnn.ops.running import slots_for, store_
from normrnn.ops.steps import Steps


class RecurrentNormaliser(OfBothTransitions, Normaliser):
    """BN(W_h h; γ_h) + BN(W_x x; γ_x) + β by the rows of each step (Cooijmans et al. 2016).

    Test statistics are those of :class:`Normaliser` for W_x x, the same with ``_hh`` for W_h h
    (C channels) and, with ``cell_norm``, with ``_c`` for c (H); one ``num_batches_tracked`` counts
    for all.
    """

    def __init__(self, channels: int, *, hidden: int, **options: Any):
        super().__init__(channels, hidden=hidden, **options)
        widths = (("_hh", channels), ("_c", hidden))[: 1 + self.cell_norm]
        for which, width in widths:
            for name in ("running_mean", "running_var"):
                like = getattr(self, name)
                value = None if like is None else like.new_empty(*like.shape[:-1], width)
                self.register_buffer(name + which, value)
        self.reset_running_stats()

    def plug(self, steps: Steps) -> RecurrentNorm:
        return RecurrentNorm(
            self.weight,
            self.gamma_hh,
            self.bias,
            self.eps,
            self._by_batch(steps),
            self.test_statistics(steps.time),
            self.cell_norm,
            self.weight_c,
            self.bias_c,
        )

    @property
    def _inputs(self) -> int:
        return self.channels

    def test_statistics(self, steps: int) -> Fixed | None:
        fixed = super().test_statistics(steps)
        if fixed is None or self.time_steps is None:
            return fixed
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        # One count is for all parts, and a step with equal inputs has updated W_h h and c alone.
        changed = (self.running_mean != 0) | (self.running_var != 1)
        slots = slots_for(self.num_batches_tracked * changed.any(1), steps)
        inputs = self.running_mean[slots], self.running_var[slots]
        mean, var = (
            torch.cat([own, every[:, self.channels :]], 1)
            for own, every in zip(inputs, fixed, strict=True)
        )
        return mean, var

    def _parts(self, name: str) -> list[Tensor]:
        """The buffers of that name: of W_x x, W_h h and, where it is normalised, c."""
        return [getattr(self, name + which) for which in ("", "_hh", "_c")[: 2 + self.cell_norm]]

    def _kept(self) -> Fixed:
        """Side by side, so that one value that is not finite holds up all."""
        return torch.cat(self._parts("running_mean"), -1), torch.cat(self._parts("running_var"), -1)

    @contextmanager
    def _running(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        assert self.num_batches_tracked is not None
        mean, var = self._kept()
        yield mean, var, self.num_batches_tracked
        for name, changed in (("running_mean", mean), ("running_var", var)):
            parts = self._parts(name)
            values = changed.split([part.shape[-1] for part in parts], -1)
            for part, value in zip(parts, values, strict=True):
                store_(part, value)

    @property
    def is_fixed_map(self) -> bool:
        return super().is_fixed_map and not self.cell_norm

    def folded(self, weights: Weights) -> Weights:
        """Plain weights of the same eval output; statistics must be shared over time."""
        fixed = self.test_statistics(1)
        assert fixed is not None
        return fold_recurrent(weights, self.weight, self.gamma_hh, self.bias, fixed, self.eps)
