"""Padded batches at an operator, whose sizes then do not depend on lengths.

A tracer cannot have N rows, a number that only the lengths know. It hands over all T·B of them,
longest sequence first, and the operator looks at those that are frames.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from normrnn.ops.check import check_sizes
from normrnn.ops.flat import C0, H0, KEPT_C, KEPT_H, RESETS, Flat, X
from normrnn.ops.steps import Steps


class Frames(NamedTuple):
    """Where the frames are among the rows that an operator was given."""

    steps: Steps
    places: Tensor | None = None
    """(N,); None: all rows are."""
    rows: int = 0
    batch: int = 0
    """With sequences that have none."""

    @staticmethod
    def of(sizes: Tensor | None, time: int, batch: int, rows: int) -> "Frames":
        steps = Steps.packed(check_sizes(sizes, time, batch, rows))
        if sizes is None or steps.rows == rows:
            return Frames(steps)
        sizes = sizes.cpu()
        starts = torch.arange(time).repeat_interleave(sizes) * batch
        within = torch.arange(len(starts)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        return Frames(steps, starts + within, rows, batch)

    def taken(self, tensors: Flat) -> Flat:
        """The flat tensors of the frames alone."""
        if self.places is None:
            return tensors
        some = list(tensors)
        for k in (X, RESETS, KEPT_H, KEPT_C):
            some[k] = self.picked(some[k])
        for k in (H0, C0):
            some[k] = self.begun(some[k])
        return some

    def picked(self, rows: Tensor | None) -> Tensor | None:
        if rows is None or self.places is None or len(rows) == 1:
            return rows
        return rows.index_select(0, self.places.to(rows.device))

    def begun(self, state: Tensor | None) -> Tensor | None:
        """(D, B, ·) of the sequences that have frames."""
        if state is None or self.places is None:
            return state
        return state[:, : self.steps.batch].contiguous()

    def spread(self, rows: Tensor) -> Tensor:
        """The other way round, with 0 in the padding."""
        if self.places is None:
            return rows
        whole = rows.new_zeros(self.rows, rows.shape[1])
        return whole.index_copy_(0, self.places.to(rows.device), rows)

    def whole(self, state: Tensor, others: Tensor | None) -> Tensor:
        """(D, B′, ·) -> (D, B, ·): sequences without frames have what ``others`` say, or 0."""
        missing = self.batch - state.shape[1]
        if self.places is None or not missing:
            return state
        if others is None:
            others = state.new_zeros(state.shape[0], self.batch, state.shape[2])
        return torch.cat([state, others[:, -missing:]], 1)
