"""One long text as fixed sequences, each read from zero state (the appendix)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from normrnn.engine.ranks import ALONE, Ranks
from normrnn.errors import UserError
from normrnn.text.streams import Window


class Sequences:
    """`ids` (N,) as sequences of T symbols in which every symbol but the first is predicted once.

    The last sequence may be shorter. Training reads whole sequences in whole batches, in an order
    drawn for each epoch: what is left out, less than a batch, is something else every time.

    >>> s = Sequences(torch.arange(8), batch=2)
    >>> [w.inputs.T.tolist() for w in s.windows(steps=3)]
    [[[0, 1, 2], [3, 4, 5]], [[6]]]
    """

    carried = False
    """Whether the state goes on from window to window."""

    def __init__(self, ids: Tensor, batch: int, name: str = "text", ranks: Ranks = ALONE) -> None:
        if len(ids) < 2:
            raise UserError(f"the {name} has {len(ids)} tokens; a prediction needs two")
        self.ids, self.batch, self.name = ids, batch, name
        self.device, self.ranks = ids.device, ranks
        self._order: tuple[tuple[int, int, int], Tensor] | None = None

    def whole(self, steps: int) -> int:
        """Sequences of full length."""
        return (len(self.ids) - 1) // steps

    def count(self, steps: int) -> int:
        """Whole batches of whole sequences."""
        count = self.whole(steps) // self.batch
        if not count:
            raise UserError(
                f"the {self.name} has {self.whole(steps)} sequences of {steps} tokens; a batch"
                f" needs {self.batch}"
            )
        return count

    def window(self, index: int, steps: int) -> Window:
        """The batch of sequences with this number, in the order of the text."""
        first = index * self.batch
        return self._window(torch.arange(first, min(first + self.batch, self.whole(steps))), steps)

    def shuffled(self, seed: int, epoch: int, index: int, steps: int) -> Window:
        """The batch with this number in the order of an epoch, which (seed, epoch) determine."""
        key = (seed, epoch, steps)
        if self._order is None or self._order[0] != key:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            self._order = key, torch.randperm(self.whole(steps), generator=generator)
        at = slice(index * self.batch, (index + 1) * self.batch)
        return self._window(self._order[1][at], steps)

    def windows(self, steps: int) -> Iterator[Window]:
        """All sequences in the order of the text, the shorter last one by itself."""
        whole = self.whole(steps)
        for index in range(-(-whole // self.batch)):
            yield self.window(index, steps)
        if whole * steps < len(self.ids) - 1:
            rest = len(self.ids) - 1 - whole * steps
            yield self._window(torch.tensor([whole]), steps, rest)

    def to(self, device: torch.device) -> "Sequences":
        """The same, its windows on a device."""
        self.device = device
        return self

    def _window(self, sequences: Tensor, steps: int, length: int = 0) -> Window:
        """The rank's share of these; the first `length` symbols, or all."""
        own = sequences[self.ranks.share(len(sequences))]
        at = own * steps + torch.arange(length or steps)[:, None]
        inputs, targets = (self.ids[i].long().to(self.device) for i in (at, at + 1))
        return Window(inputs, targets, len(sequences))
