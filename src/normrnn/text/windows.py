"""Windows of a text: contiguous streams (section 5.2), or fixed sequences (the appendix)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normrnn.engine.ranks import ALONE, Ranks
from normrnn.errors import UserError


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


class Streams(Sequence[Window]):
    """A text of N tokens as B contiguous streams in which every token but the first is predicted.

    The N - 1 positions rarely divide by B: the first r = (N - 1) mod B streams are one position
    longer. All streams share the first `common` windows; the last, where r > 0, has one step of
    the longer streams. Training reads the common windows only.

    >>> text = Streams(tokens=8, batch=3, steps=2)
    >>> [w.read(torch.arange(8))[0].tolist() for w in text]
    [[[0, 3, 5], [1, 4, 6]], [[2]]]
    """

    def __init__(self, tokens: int, batch: int, steps: int, name: str = "text") -> None:
        if tokens - 1 < batch:
            raise UserError(
                f"the {name} has {tokens} tokens; {batch} streams need at least {batch + 1}"
            )
        self._length, self._longer = divmod(tokens - 1, batch)
        self._batch, self._steps = batch, steps
        b = torch.arange(batch)
        self._starts = b * self._length + b.clamp(max=self._longer)
        self.common = -(-self._length // steps)

    def __len__(self) -> int:
        return self.common + (self._longer > 0)

    def __getitem__(self, index: int) -> Window:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        if index == self.common:
            return Window(self._starts[: self._longer] + self._length, 1, self._batch)
        start = index * self._steps
        length = min(self._steps, self._length - start)
        return Window(self._starts + start, length, self._batch)


class Sequences(Sequence[Window]):
    """A text of N tokens as sequences of `steps` tokens, B at a time, the shorter rest alone.

    Training reads the first `common` windows, whole batches of whole sequences, in a `shuffled`
    order: what is left out, less than a batch, differs from epoch to epoch.

    >>> text = Sequences(tokens=8, batch=2, steps=3)
    >>> [w.read(torch.arange(8))[0].T.tolist() for w in text]
    [[[0, 1, 2], [3, 4, 5]], [[6]]]
    """

    def __init__(self, tokens: int, batch: int, steps: int, name: str = "text") -> None:
        if tokens < 2:
            raise UserError(f"the {name} has {tokens} tokens; a prediction needs two")
        self._batch, self._steps, self.name = batch, steps, name
        self.whole, self._rest = divmod(tokens - 1, steps)
        self._order = torch.arange(self.whole)
        self.common = self.whole // batch

    def shuffled(self, seed: int) -> "Sequences":
        """Return the same sequences in an order that the seed determines."""
        other = Sequences(self.whole * self._steps + 1, self._batch, self._steps, self.name)
        generator = torch.Generator().manual_seed(seed)
        other._order = torch.randperm(self.whole, generator=generator)
        return other

    def __len__(self) -> int:
        return -(-self.whole // self._batch) + (self._rest > 0)

    def __getitem__(self, index: int) -> Window:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._rest and index == len(self) - 1:
            return Window(torch.tensor([self.whole * self._steps]), self._rest, 1)
        numbers = self._order[index * self._batch : (index + 1) * self._batch]
        return Window(numbers * self._steps, self._steps, len(numbers))
