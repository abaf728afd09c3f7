"""B contiguous streams out of one long text, read in windows (section 5.2)."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from normrnn.errors import UserError


class Window(NamedTuple):
    """Inputs and the tokens that follow them, both (T, B)."""

    inputs: Tensor
    targets: Tensor


class Streams:
    """`ids` (N,) as B contiguous streams in which every token but the first is predicted once.

    The N - 1 positions rarely divide by B: the first r = (N - 1) mod B streams are one position
    longer. `inputs` and `targets` (n, B) hold what all streams have, `tail` the last step of the
    longer ones, or None. Training reads windows of the common part only, evaluation the tail too.

    >>> s = Streams(torch.arange(8), 3)
    >>> s.inputs.tolist(), s.tail.inputs.tolist(), s.tail.targets.tolist()
    ([[0, 3, 5], [1, 4, 6]], [[2]], [[3]])
    """

    carried = True
    """Whether the state goes on from window to window."""

    def __init__(self, ids: Tensor, batch: int, name: str = "text") -> None:
        positions = len(ids) - 1
        if positions < batch:
            raise UserError(
                f"the {name} has {len(ids)} tokens; {batch} streams need at least {batch + 1}"
            )
        self.batch = batch
        length, extra = divmod(positions, batch)
        b = torch.arange(batch)
        starts = b * length + b.clamp(max=extra)
        at = starts + torch.arange(length)[:, None]
        self.inputs, self.targets = ids[at], ids[at + 1]
        last = starts[None, :extra] + length
        self.tail = Window(ids[last], ids[last + 1]) if extra else None

    def __len__(self) -> int:
        return len(self.inputs)

    def count(self, steps: int) -> int:
        """Windows of `steps` positions, a shorter last one included."""
        return -(-len(self.inputs) // steps)

    def window(self, index: int, steps: int) -> Window:
        """The window with this number, without the tail."""
        at = slice(index * steps, (index + 1) * steps)
        return Window(self.inputs[at], self.targets[at])

    def windows(self, steps: int) -> Iterator[Window]:
        """All windows in order, then the tail: its streams are the first of the others."""
        for index in range(self.count(steps)):
            yield self.window(index, steps)
        if self.tail is not None:
            yield self.tail

    def to(self, device: torch.device) -> "Streams":
        """The same streams, moved once rather than window by window."""
        self.inputs, self.targets = self.inputs.to(device), self.targets.to(device)
        if self.tail is not None:
            self.tail = Window(self.tail.inputs.to(device), self.tail.targets.to(device))
        return self
