"""Scoring a text with a language model: which statistics, how many streams.

- running: the buffers as training left them;
- recalibrated: population statistics over training windows, in order, without dropout;
- batch: each window's own statistics, as the authors' code validated.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normrnn import batch_statistics, recalibrate
from normrnn.engine.task import Poll, Row, Tensors
from normrnn.errors import UserError
from normrnn.runs.metrics import perplexity
from normrnn.text.model import LanguageModel, State
from normrnn.text.sequences import Sequences
from normrnn.text.streams import Streams, Window

Statistics = Literal["running", "recalibrated", "batch"]
Text = Streams | Sequences


@dataclass(frozen=True)
class Score:
    """Cross entropy summed over every predicted token, and the authors' way to average it."""

    nats: float
    count: int
    batch_ppl: float
    """Arithmetic mean of the mini-batches' perplexities, remainder dropped: the authors' figure."""
    streams: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.count

    def row(self, split: str, statistics: Statistics) -> Row:
        """As metrics.jsonl and evaluation.json have it."""
        return {
            "split": split,
            "statistics": statistics,
            "loss": self.loss,
            "count": self.count,
            "batch_ppl": self.batch_ppl,
            "streams": self.streams,
        }


@torch.no_grad()
def score(
    model: LanguageModel, text: Text, steps: int, poll: Poll, *, own_statistics: bool = False
) -> Score:
    """Every token but the first, predicted once; eval mode.

    The state of streams is carried on from zero, sequences start from zero each.
    """
    was_training = model.training
    model.eval()
    nats, count, ppls, partial = 0.0, 0, [], []
    state: State | None = None
    for window in text.windows(steps):
        poll()
        rows = window.inputs.shape[1]
        if not text.carried:
            state = None
        elif state is not None:
            # The tail's streams are the first ones.
            state = tuple(s[:, :rows].contiguous() for s in state)
        # One row has no statistics of its own.
        use_own = own_statistics and rows > 1
        with batch_statistics(model) if use_own else contextlib.nullcontext():
            loss, state = model.loss(window.inputs, window.targets, state)
        value, n = loss.item(), window.targets.numel()
        nats, count = nats + value, count + n
        full = window.targets.shape == (steps, text.batch)
        (ppls if full else partial).append(perplexity(value / n))
    model.train(was_training)
    ppls = ppls or partial  # a text shorter than one window
    return Score(nats, count, sum(ppls) / len(ppls), text.batch)


def statistics_of(model: nn.Module) -> Tensors:
    """A copy of all buffers: the normalisers' statistics, and what else the model keeps there."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def set_statistics(model: nn.Module, statistics: Tensors) -> None:
    """Put such a copy back; UserError if it is another network's."""
    buffers = dict(model.named_buffers())
    if any(n not in buffers or buffers[n].shape != v.shape for n, v in statistics.items()):
        raise UserError("the saved statistics belong to another network")
    with torch.no_grad():
        for name, value in statistics.items():
            buffers[name].copy_(value)


def population_statistics(
    model: LanguageModel, train: Text, steps: int, windows: int, poll: Poll
) -> Tensors:
    """Recalibrated statistics over the first training windows; the model keeps its own."""
    state: State | None = None

    def step(_: nn.Module, window: Window) -> Tensor:
        nonlocal state
        poll()
        features, state = model.features(window.inputs, state if train.carried else None)
        return features

    some = (train.window(i, steps) for i in range(min(windows, train.count(steps))))
    before = statistics_of(model)
    try:
        with torch.no_grad():
            recalibrate(model, some, step=step)
        return statistics_of(model)
    finally:
        set_statistics(model, before)


@contextlib.contextmanager
def using(model: nn.Module, statistics: Tensors) -> Iterator[None]:
    """These statistics inside, the model's own outside."""
    before = statistics_of(model)
    set_statistics(model, statistics)
    try:
        yield
    finally:
        set_statistics(model, before)


LONG_WINDOW = 2000
"""Steps per window where the window's length does not matter: one stream is slow in short ones."""


@torch.no_grad()
def token_nats(model: LanguageModel, text: Text, steps: int) -> Tensor:
    """Cross entropy (N - 1,) of every token but the first of a text read with batch 1."""
    model.eval()
    state: State | None = None
    parts = []
    for window in text.windows(steps):
        logits, state = model(window.inputs, state if text.carried else None)
        nats = F.cross_entropy(logits.flatten(0, 1), window.targets.flatten(), reduction="none")
        parts.append(nats)
    return torch.cat(parts)


@torch.no_grad()
def sample(
    model: LanguageModel,
    start: list[int],
    count: int,
    steps: int,
    temperature: float,
    generator: torch.Generator,
    *,
    carried: bool = True,
) -> list[int]:
    """`count` ids that follow `start`, drawn one at a time.

    With statistics kept per position the window's tokens are read again at every step, so that
    each meets the statistics of its own position; `steps` is 1 otherwise. Where no state is
    carried on, a full window is followed by one that begins with its second half.
    """
    model.eval()
    state: State | None = None
    window: list[int] = []
    drawn: list[int] = []
    feed = list(start)
    while True:
        for token in feed:
            window.append(token)
            logits, after = model(torch.tensor(window)[:, None], state)
            if len(window) == steps:
                state, window = (after, []) if carried else (None, window[steps - steps // 2 :])
        if len(drawn) == count:
            return drawn
        last = logits[-1, 0]  # type: ignore[possibly-unbound]
        # From the largest down: however small the temperature, nothing overflows.
        probabilities = torch.softmax((last - last.max()) / max(temperature, 1e-30), 0)
        drawn.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        feed = drawn[-1:]
