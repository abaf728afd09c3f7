"""Windows of a text: contiguous streams (section 5.2), or fixed sequences (the appendix).

In both every token but the first is predicted exactly once. Training reads windows of the full
batch only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from normrnn.engine.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Window:
    """`length` tokens from each of `starts` (B,)."""

    starts: Tensor
    length: int
    streams: int
    """Rows that ranks share: a rank keeps its streams where only the first ones have a window."""

    def __len__(self) -> int:
        """Return the number of rows, B."""
        return len(self.starts)

    def read(self, ids: Tensor, ranks: Ranks = ALONE) -> tuple[Tensor, Tensor]:
        """Return the tokens and those that follow them, both (T, B), of this rank's share."""
        at = self.starts[ranks.share(self.streams)] + torch.arange(self.length)[:, None]
        return ids[at].long(), ids[at + 1].long()


def streams(tokens: int, batch: int, steps: int, training: bool = False) -> list[Window]:
    """Return the windows of a text of N tokens as B contiguous streams.

    The N - 1 positions rarely divide by B: the first r = (N - 1) mod B streams are one position
    longer, which is a last window of one step. Training leaves it out.

    >>> [w.read(torch.arange(8))[0].tolist() for w in streams(tokens=8, batch=3, steps=2)]
    [[[0, 3, 5], [1, 4, 6]], [[2]]]
    """
    length, longer = divmod(tokens - 1, batch)
    b = torch.arange(batch)
    starts = b * length + b.clamp(max=longer)
    begins = range(0, length, steps)
    windows = [Window(starts + at, min(steps, length - at), batch) for at in begins]
    if longer and not training:
        windows.append(Window(starts[:longer] + length, 1, batch))
    return windows


def sequences(
    tokens: int, batch: int, steps: int, training: bool = False, seed: int | None = None
) -> list[Window]:
    """Return the windows of a text of N tokens as sequences, B at a time, the shorter rest alone.

    Training leaves out what does not fill a batch: with a `seed`, which determines an order of the
    sequences, others in every epoch.

    >>> [w.read(torch.arange(8))[0].T.tolist() for w in sequences(tokens=8, batch=2, steps=3)]
    [[[0, 1, 2], [3, 4, 5]], [[6]]]
    """
    whole, rest = divmod(tokens - 1, steps)
    order = torch.arange(whole)
    if seed is not None:
        order = torch.randperm(whole, generator=torch.Generator().manual_seed(seed))
    windows = [Window(some * steps, steps, len(some)) for some in order.split(batch) if len(some)]
    if training:
        return windows[: whole // batch]
    if rest:
        windows.append(Window(torch.tensor([whole * steps]), rest, 1))
    return windows
