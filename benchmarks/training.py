"""Tokens per second of the training engine beside a minimal hand-written loop.

    python -m benchmarks.training [--recipes ptb-small,ptb-medium] [--rounds 5] [--updates 4]

The same network, batch, clipping and step, written down with `torch.nn.LSTM` in the fewest lines,
against `Trainer.update` with and without normalisation. The three take turns in one process on
one thread; the best round of each counts. Random tokens: speed does not depend on the text.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from normrnn.data.corpus import Corpus
from normrnn.data.vocabulary import EOS, Vocabulary
from normrnn.recipes import recipe
from normrnn.recipes.language import LanguageConfig
from normrnn.train.display import PlainDisplay
from normrnn.train.interrupt import Interrupt
from normrnn.train.language import LanguageTask
from normrnn.train.loop import Trainer
from normrnn.train.rundir import RunDirectory

VOCABULARY = 10_000


class HandWritten(nn.Module):
    """Zaremba's network as a tutorial has it."""

    def __init__(self, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens, state):
        output, state = self.lstm(self.dropout(self.embedding(tokens)), state)
        return self.decoder(self.dropout(output)), state


def hand_written(config: LanguageConfig, ids: torch.Tensor) -> Callable[[], None]:
    """One update per call."""
    B, T = config.train.batch, config.train.steps
    model = HandWritten(config.model.hidden, config.model.layers, config.model.dropout)
    optimizer = torch.optim.SGD(model.parameters(), config.optimizer.lr)
    n = (len(ids) - 1) // B
    inputs = ids[: n * B].view(B, n).t().contiguous()
    targets = ids[1 : n * B + 1].view(B, n).t().contiguous()
    state, at = None, 0

    def update() -> None:
        nonlocal state, at
        if state is not None:
            state = tuple(s.detach() for s in state)
        optimizer.zero_grad()
        logits, state = model(inputs[at : at + T], state)
        loss = F.cross_entropy(logits.flatten(0, 1), targets[at : at + T].flatten())
        (loss * T).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        loss.item()
        at += T

    return update


def engine(config: LanguageConfig, ids: torch.Tensor, where: Path) -> Callable[[], None]:
    """One update of the real trainer per call."""
    symbols = (EOS, *(f"w{i}" for i in range(VOCABULARY - 1)))
    task = LanguageTask(config, Corpus(ids, ids, ids, Vocabulary(symbols)), torch.device("cpu"))
    display = PlainDisplay(config.epochs, task.unit)
    trainer = Trainer(config, task, RunDirectory(where), display, Interrupt())
    task.model.train()
    return lambda: trainer.update(config.optimizer.lr)


def measure(name: str, rounds: int, updates: int) -> None:
    """Print one line per contender."""
    config = recipe(name)
    assert isinstance(config, LanguageConfig)
    tokens = config.train.batch * config.train.steps
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (tokens * (rounds * updates + 2) + 1,))
    with tempfile.TemporaryDirectory() as where:
        contenders = {"hand-written nn.LSTM": hand_written(config, ids)}
        for norm in ("none", "frame"):
            label = f"normrnn, norm {norm}"
            contenders[label] = engine(replace(config, norm=norm), ids, Path(where))
        best = dict.fromkeys(contenders, float("inf"))
        for update in contenders.values():
            update()
        for _ in range(rounds):
            for label, update in contenders.items():
                start = time.perf_counter()
                for _ in range(updates):
                    update()
                best[label] = min(best[label], (time.perf_counter() - start) / updates)
    base = best["hand-written nn.LSTM"]
    for label, seconds in best.items():
        print(
            f"{name:<12} {label:<22} {tokens / seconds:>9,.0f} tokens/s"
            f"   {base / seconds:.2f} x hand-written",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Training speed against a hand-written loop.")
    parser.add_argument("--recipes", default="ptb-small,ptb-medium")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.recipes.split(","):
        measure(name, options.rounds, options.updates)


if __name__ == "__main__":
    main()
