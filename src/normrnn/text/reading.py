"""Tokens as they come: a text scored, text drawn, read in windows as in training."""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.deploy.stream import Stream
from normrnn.engine.statistics import evaluating
from normrnn.engine.sums import State
from normrnn.norms import get
from normrnn.text.config import LanguageConfig
from normrnn.text.model import LanguageModel

LOGITS = 1 << 24
"""Logits in memory at once."""


class Reader:
    """A language model that gets some tokens at a time, in constant memory.

    Where training carried the state, the text is one stream. Else windows of `steps` tokens begin
    from zero state; with `overlap` the second half of a full window is read again first, as
    context. With statistics kept per position, the tokens of the window are read again with each
    push, so that each token is normalised with those of its position.
    """

    def __init__(
        self, model: LanguageModel, steps: int = 1, carried: bool = True, overlap: bool = False
    ) -> None:
        self.carried, self.overlap = carried, overlap
        slots = get(model.rnn.norm).keeps_statistics and model.rnn.time_steps is not None
        self.model = model if slots else None
        self.stream = None if slots else Stream(model)
        self.steps = steps if slots or not carried else 0
        self.chunk = max(1, LOGITS // model.decoder.out_features)
        self.window: list[int] = []
        self.state: State | None = None
        """State at the start of the window, where that is read again."""

    @classmethod
    def as_trained(
        cls, model: LanguageModel, config: LanguageConfig, overlap: bool = False
    ) -> Self:
        """Read windows as training did."""
        train = config.train
        return cls(model, train.steps, train.reading == "streams", overlap)

    @torch.no_grad()
    def push(self, ids: list[int]) -> Tensor:
        """Return logits (T, C) of the token after each of these T ≥ 1 tokens."""
        parts = []
        while ids:
            free = self.steps - len(self.window) if self.steps else len(ids)
            some, ids = ids[:free], ids[free:]
            parts.append(self._read(some))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def nats(self, ids: list[int]) -> Tensor:
        """Return the cross entropy (N - 1,) of every token but the first."""
        parts = []
        for start in range(0, len(ids) - 1, self.chunk):
            some = ids[start : start + self.chunk + 1]
            logits = self.push(some[:-1])
            parts.append(F.cross_entropy(logits, torch.tensor(some[1:]), reduction="none"))
        return torch.cat(parts)

    def draw(
        self, start: list[int], count: int, generator: torch.Generator, temperature: float = 1.0
    ) -> list[int]:
        """Draw `count` ids that follow `start`, one at a time."""
        drawn: list[int] = []
        last = self.push(start)[-1]
        while len(drawn) < count:
            # Relative to the largest, so that a small temperature does not overflow.
            scaled = (last - last.max()) / max(temperature, 1e-30)
            drawn.append(int(torch.multinomial(scaled.softmax(0), 1, generator=generator)))
            if len(drawn) < count:
                last = self.push(drawn[-1:])[0]
        return drawn

    def _read(self, ids: list[int]) -> Tensor:
        after = None
        if self.steps:
            self.window += ids
        if self.stream is not None:
            logits = self.stream.push(ids[0] if len(ids) == 1 else torch.tensor(ids))
            logits = logits[None] if len(ids) == 1 else logits
        else:
            assert self.model is not None
            with evaluating(self.model):
                every, after = self.model(torch.tensor(self.window)[:, None], self.state)
            logits = every[-len(ids) :, 0]
        if self.steps and len(self.window) == self.steps:
            self._turn(after)
        return logits

    def _turn(self, after: State | None) -> None:
        """Begin the next window."""
        if self.carried:
            self.window, self.state = [], after
            return
        self.window = self.window[self.steps - self.steps // 2 :] if self.overlap else []
        if self.stream is not None:
            self.stream.reset()
            if self.window:
                self.stream.push(torch.tensor(self.window))
