"""Tokens as they come: a text scored, text drawn, read in windows as in training."""

from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.deploy.stream import Stream
from normrnn.engine.model import CHUNK_ROWS, State
from normrnn.nn.recalibrate import eval_mode
from normrnn.norms import get
from normrnn.runs.environment import named_device
from normrnn.runs.store import RunDirectory
from normrnn.text.config import LanguageConfig
from normrnn.text.task import LanguageModel, LanguageTask


class Reader:
    """A language model that gets some tokens at a time, in constant memory.

    Where training carried the state, the text is one stream. Otherwise, and with statistics kept
    per position, it is cut into windows of `steps` tokens as in training, and the tokens of the
    window are read again with each push. Windows that begin from zero state may `overlap`: then the
    second half of a full window is the context of the next.
    """

    def __init__(
        self, model: LanguageModel, steps: int = 1, carried: bool = True, overlap: bool = False
    ) -> None:
        has_slots = get(model.rnn.norm).keeps_statistics and model.rnn.time_steps is not None
        self.model, self.steps, self.carried = model, steps, carried
        self.stream = Stream(model) if carried and not has_slots else None
        self.kept = steps // 2 if overlap and not carried else 0
        self.window: list[int] = []
        self.state: State | None = None
        """State at the start of the window."""

    @classmethod
    def of_run(cls, run: str | Path, overlap: bool = False) -> Self:
        """Read with the best model of a run, in windows as in its training."""
        directory = RunDirectory(Path(run))
        train = directory.config(LanguageConfig).train
        model = LanguageTask.load(directory, named_device("cpu"))
        return cls(model, train.steps, train.reading == "streams", overlap)

    @torch.no_grad()
    def push(self, ids: list[int]) -> Tensor:
        """Return logits (T, C) of the token after each of these T ≥ 1 tokens."""
        if self.stream is not None:
            return self.stream.push(torch.tensor(ids))
        parts = []
        while ids:
            free = self.steps - len(self.window)
            some, ids = ids[:free], ids[free:]
            self.window += some
            with eval_mode(self.model):
                logits, after = self.model(torch.tensor(self.window)[:, None], self.state)
            parts.append(logits[-len(some) :, 0])
            if len(self.window) == self.steps:
                self.state = after if self.carried else None
                self.window = self.window[self.steps - self.kept :]
        return torch.cat(parts)

    def nats(self, ids: list[int]) -> Tensor:
        """Return the cross entropy (N - 1,) of every token but the first."""
        parts = []
        for start in range(0, len(ids) - 1, CHUNK_ROWS):
            some = ids[start : start + CHUNK_ROWS + 1]
            logits = self.push(some[:-1])
            parts.append(F.cross_entropy(logits, torch.tensor(some[1:]), reduction="none"))
        return torch.cat(parts)

    def draw(
        self, start: list[int], count: int, generator: torch.Generator, temperature: float = 1.0
    ) -> list[int]:
        """Draw `count` ids that follow `start`, one at a time."""
        drawn: list[int] = []
        given = start
        for _ in range(count):
            last = self.push(given)[-1]
            # Relative to the largest, so that a small temperature does not overflow.
            scaled = (last - last.max()) / max(temperature, 1e-30)
            given = [int(torch.multinomial(scaled.softmax(0), 1, generator=generator))]
            drawn += given
        return drawn
