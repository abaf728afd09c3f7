"""B contiguous streams out of one long text, read in windows (section 5.2)."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from normrnn.engine.ranks import ALONE, Ranks
from normrnn.errors import UserError


class Window(NamedTuple):
    """Inputs and the tokens that follow them, both (T, B), of all streams or of a rank's share."""

    inputs: Tensor
    targets: Tensor
    streams: int
    """B of all ranks."""

    @property
    def tokens(self) -> int:
        """Predicted, on all ranks."""
        return len(self.targets) * self.streams


class Streams:
    """`ids` (N,) as B contiguous streams in which every token but the first is predicted once.

    The N - 1 positions rarely divide by B: the first r = (N - 1) mod B streams are one position
    longer. A window of n positions is what all streams have, `tail` the last step of the longer
    ones, or None. Training reads windows of the common part only, evaluation the tail too. Of
    several ranks each reads its share of the streams. Ids stay where they are, maybe on disk: only
    windows are made.

    >>> s = Streams(torch.arange(8), 3)
    >>> s.window(0, 2).inputs.tolist(), s.tail.inputs.tolist(), s.tail.targets.tolist()
    ([[0, 3, 5], [1, 4, 6]], [[2]], [[3]])
    >>> Streams(torch.arange(8), 3, ranks=Ranks(1, 2)).window(0, 2).inputs.tolist()
    [[5], [6]]
    """

    carried = True
    """Whether the state goes on from window to window."""

    def __init__(self, ids: Tensor, batch: int, name: str = "text", ranks: Ranks = ALONE) -> None:
        positions = len(ids) - 1
        if positions < batch:
            raise UserError(
                f"the {name} has {len(ids)} tokens; {batch} streams need at least {batch + 1}"
            )
        self.ids, self.batch, self.device, self.ranks = ids, batch, ids.device, ranks
        self._length, self._longer = divmod(positions, batch)
        b = torch.arange(batch)
        self._own = ranks.share(batch)
        self._starts = (b * self._length + b.clamp(max=self._longer))[self._own]

    def __len__(self) -> int:
        return self._length

    @property
    def tail(self) -> Window | None:
        """The last step of the longer streams, which are the first."""
        if not self._longer:
            return None
        own = max(0, min(self._longer, self._own.stop) - self._own.start)
        return self._window(self._starts[None, :own] + self._length, self._longer)

    def count(self, steps: int) -> int:
        """Windows of `steps` positions, a shorter last one included."""
        return -(-len(self) // steps)

    def window(self, index: int, steps: int) -> Window:
        """The window with this number, without the tail."""
        steps_of = torch.arange(index * steps, min((index + 1) * steps, len(self)))
        return self._window(self._starts + steps_of[:, None], self.batch)

    def windows(self, steps: int) -> Iterator[Window]:
        """All windows in order, then the tail: its streams are the first of the others."""
        for index in range(self.count(steps)):
            yield self.window(index, steps)
        if self.tail is not None:
            yield self.tail

    def to(self, device: torch.device) -> "Streams":
        """The same streams, their windows on a device."""
        self.device = device
        return self

    def _window(self, at: Tensor, streams: int) -> Window:
        inputs, targets = (self.ids[i].long().to(self.device) for i in (at, at + 1))
        return Window(inputs, targets, streams)
