"""Tokens and frames per second of the training engine beside minimal hand-written loops.

    python -m benchmarks.training [--recipes ptb-small,ptb-medium] [--speech SHAPE,...]
    python -m benchmarks.training --memory
    python -m benchmarks.training --loss
    python -m benchmarks.training --processes 2 [--norms none,sequence,frame,layer]

The same network, batch, clipping and step, written down with `torch.nn.LSTM` in the fewest lines,
against `Trainer.update` with and without normalisation. The contenders take turns in one process
on one thread; the best round of each counts. Random data: speed does not depend on it. Behind
each language model, what the checkpoints of an epoch cost. Packed sequences in `torch.nn.LSTM`
take minutes, and so have a single update. `--processes K` is another question: K processes of one
thread against one process of K threads, and what it costs to pool statistics over them.
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

from benchmarks import processes, speech_training
from normrnn.engine.loop import Interrupt, Trainer
from normrnn.engine.model import nats_and_errors
from normrnn.recipes import recipe
from normrnn.runs.records import CHECKPOINT
from normrnn.runs.store import RunDirectory
from normrnn.text.config import LanguageConfig, TrainConfig
from normrnn.text.corpus import EOS, Corpus, Vocabulary
from normrnn.text.task import LanguageTask

VOCABULARY = 10_000
PTB_TOKENS = 929_589
ONCE = ("nn.LSTM, packed",)
Contenders = dict[str, Callable[[], None]]


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


def engine(config: LanguageConfig, ids: torch.Tensor, where: Path) -> Trainer:
    """The real trainer."""
    symbols = (EOS, *(f"w{i}" for i in range(VOCABULARY - 1)))
    task = LanguageTask(config, Corpus(ids, ids, ids, Vocabulary(symbols)))
    task.build(torch.device("cpu"))
    trainer = Trainer(config, task, RunDirectory(where), Interrupt())
    task.model.train()
    return trainer


def text_contenders(name: str, updates: int, where: Path) -> tuple[Contenders, int, Trainer]:
    """Updates of a language model by label, tokens per update, and the last trainer."""
    config = recipe(name)
    assert isinstance(config, LanguageConfig)
    tokens = config.train.batch * config.train.steps
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (tokens * (updates + 1) + 1,))
    contenders = {"hand-written nn.LSTM": hand_written(config, ids)}
    for norm in ("none", "frame"):
        trainer = engine(replace(config, norm=norm), ids, where)
        contenders[f"normrnn, norm {norm}"] = trainer.update
    return contenders, tokens, trainer


def print_checkpoints(name: str, trainer: Trainer, update: float) -> None:
    """What the checkpoints of an epoch of Penn Treebank cost, as a share of its updates."""
    config = trainer.config.train
    assert isinstance(config, TrainConfig)
    updates = (PTB_TOKENS - 1) // config.batch // config.steps
    ends = {updates * (i + 1) // config.segments for i in range(config.segments)}
    inside = set(range(config.checkpoint_every, updates, config.checkpoint_every))
    count = len(inside - ends) + 2 * len(ends)  # before and after every validation
    begin = time.perf_counter()
    for _ in range(3):
        trainer.save()
    each = (time.perf_counter() - begin) / 3
    size = (trainer.run_directory.path / CHECKPOINT).stat().st_size
    print(
        f"{name:<20} a checkpoint of {size / 2**20:.0f} MB with its checksum takes {each:.2f} s;"
        f" {count} in an epoch of {updates} updates: {count * each / (updates * update):.2%} of it",
        flush=True,
    )


def loss_contenders(rows: int, hidden: int) -> Contenders:
    """Softmax over the vocabulary, forward and backward; and torch's products in it, a bound."""
    torch.manual_seed(1)
    x = torch.randn(rows, hidden, requires_grad=True)
    weight = torch.randn(VOCABULARY, hidden).mul_(0.05).requires_grad_()
    bias = torch.zeros(VOCABULARY, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (rows,))
    losses: dict[str, Callable[[], torch.Tensor]] = {
        "linear, cross_entropy": lambda: F.cross_entropy(F.linear(x, weight, bias), targets),
        "normrnn": lambda: nats_and_errors(x, weight, bias, targets)[0] / rows,
        "linear_cross_entropy": lambda: F.linear_cross_entropy(
            x, weight, targets, linear_bias=bias, options=nn.LinearCrossEntropyOptions()
        ),
    }
    parts = (x, weight, bias)
    found = {k: lambda f=f: (torch.autograd.grad(f(), parts), None)[1] for k, f in losses.items()}
    W, z = weight.detach(), torch.randn(rows, VOCABULARY)

    def products() -> None:  # what every way of computing it has to do, and nothing else
        _ = x.detach() @ W.T, z @ W, z.T @ x.detach()

    return found | {"three products alone": products}


def measure(
    name: str, contenders: Contenders, count: int, unit: str, rounds: int, updates: int
) -> dict[str, float]:
    """Let them take turns; print the best round of each and its ratio to the first's."""
    best = dict.fromkeys(contenders, float("inf"))
    for label, update in contenders.items():
        if label not in ONCE:
            update()
    for n in range(rounds):
        for label, update in contenders.items():
            repeat = 1 if label in ONCE else updates
            if n and label in ONCE:
                continue
            start = time.perf_counter()
            for _ in range(repeat):
                update()
            best[label] = min(best[label], (time.perf_counter() - start) / repeat)
    base_label, base = next(iter(best.items()))
    for label, seconds in best.items():
        print(
            f"{name:<20} {label:<22} {count / seconds:>9,.0f} {unit}/s"
            f"   {base / seconds:.2f} x the speed of {base_label}",
            flush=True,
        )
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Training speed against hand-written networks.")
    parser.add_argument("--recipes", default="ptb-small,ptb-medium")
    parser.add_argument("--speech", default=",".join(speech_training.SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true", help="peak of a speech update, no speed")
    parser.add_argument("--loss", action="store_true", help="the softmax alone")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--norms", default="none,sequence,frame,layer", help="with --processes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rounds, updates = options.rounds, options.updates
    if options.processes > 1:
        shapes = options.speech if options.speech in ("", processes.SPEECH) else processes.SPEECH
        for case in filter(None, [*options.recipes.split(","), shapes]):
            for norm in options.norms.split(","):
                processes.compare(case, norm, options.processes, rounds, updates)
        return
    with tempfile.TemporaryDirectory() as where:
        if options.memory:
            speech_training.print_memory(Path(where))
            return
        if options.loss:
            for size, shape in {"small": (640, 200), "medium": (1120, 650)}.items():
                measure(f"softmax, {size}", loss_contenders(*shape), shape[0], "rows", rounds, 4)
            return
        for name in filter(None, options.recipes.split(",")):
            found, tokens, trainer = text_contenders(name, rounds * updates, Path(where))
            best = measure(name, found, tokens, "tokens", rounds, updates)
            print_checkpoints(name, trainer, min(best.values()))
        for shape in filter(None, options.speech.split(",")):
            found, frames = speech_training.contenders(shape, Path(where))
            measure(shape, found, frames, "frames", rounds, 1)


if __name__ == "__main__":
    main()
