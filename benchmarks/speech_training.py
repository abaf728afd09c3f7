"""Updates of the speech recipe beside the same network with `torch.nn.LSTM`.

Part of `python -m benchmarks.training`. Features and labels are made up and held in memory.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from benchmarks.machine import peak_growth
from normrnn.engine.loop import Interrupt, Trainer
from normrnn.recipes import librispeech_mini
from normrnn.runs.store import RunDirectory
from normrnn.speech.config import SpeechConfig
from normrnn.speech.corpus import Entry, SpeechCorpus, SpeechSplit
from normrnn.speech.task import SpeechTask

CLASSES, DIM = 5126, 123
EQUAL = "nearly equal lengths"
SHAPES = {  # utterances, shortest, longest
    EQUAL: (24, 760, 800),
    "ragged": (24, 200, 800),
    "librispeech-mini": (16, 200, 400),
}
LONGEST = {  # batches that need the most memory
    "wsj": (24, 1300, 1300),
    "librispeech-mini": (16, 400, 400),
}


@dataclass(frozen=True)
class _Made(SpeechSplit):
    """Noise instead of speech."""

    def features(self, index: int, start: int = 0, stop: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(self.lengths[index], DIM, generator=generator)[start:stop]

    def labels(self, index: int, start: int = 0, stop: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        size = (self.lengths[index],)
        return torch.randint(0, CLASSES, size, generator=generator)[start:stop]


class HandWritten(nn.Module):
    """The same network as one would write it with `torch.nn.LSTM`."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.lstm = nn.LSTM(DIM, 250, 5, bidirectional=True)
        self.decoder = nn.Linear(500, CLASSES)

    def forward(self, utterances: PackedSequence) -> Tensor:
        if self.packed:
            return self.decoder(self.lstm(utterances)[0].data)
        padded, lengths = pad_packed_sequence(utterances)
        output = self.lstm(padded)[0]
        valid = torch.arange(len(padded))[:, None] < lengths
        return self.decoder(output[valid])


def hand_written(features: list[Tensor], labels: list[Tensor], packed: bool) -> Callable[[], None]:
    """One update per call, always of the same batch."""
    model = HandWritten(packed)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    utterances, targets = pack_sequence(features), pack_sequence(labels).data

    def update() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(utterances), targets, reduction="sum")
        (loss / len(features)).backward()
        optimizer.step()
        loss.item()

    return update


def engine(config: SpeechConfig, split: SpeechSplit, where: Path) -> Callable[[], None]:
    """The same by the real trainer, reading and batching included."""
    corpus = SpeechCorpus(
        where,
        CLASSES,
        DIM,
        split,
        split,
        torch.zeros(DIM),
        torch.ones(DIM),
        torch.ones(CLASSES, dtype=torch.long),
        "",
    )
    task = SpeechTask(config, corpus).build(torch.device("cpu"))
    trainer = Trainer(config, task, RunDirectory(where), Interrupt())
    task.model.train()

    def update() -> None:
        trainer.progress.index = 0  # the split is one batch, again and again
        trainer.update()

    return update


def made(batch: int, shortest: int, longest: int, where: Path) -> tuple[SpeechConfig, SpeechSplit]:
    """The recipe for a split that is one batch of noise."""
    lengths = torch.linspace(longest, shortest, batch).round().int().tolist()
    entries = [Entry(str(i), "", lengths[i], (0, 0), (0, 0), ("", "")) for i in range(batch)]
    split = _Made(where, entries)
    config = librispeech_mini()
    return replace(config, train=replace(config.train, batch=batch, piece_frames=0)), split


def contenders(shape: str, where: Path) -> tuple[dict[str, Callable[[], None]], int]:
    """Updates by label, and frames per update."""
    config, split = made(*SHAPES[shape], where)
    features = [split.features(i) for i in range(len(split.lengths))]
    labels = [split.labels(i) for i in range(len(split.lengths))]
    found = {"nn.LSTM, padded": hand_written(features, labels, packed=False)}
    for norm in ("none", "sequence"):
        found[f"normrnn, norm {norm}"] = engine(replace(config, norm=norm), split, where)
    if shape != EQUAL:  # packing is for ragged batches
        found["nn.LSTM, packed"] = hand_written(features, labels, packed=True)
    return found, sum(split.lengths)


def print_memory(where: Path) -> None:
    """Peak of an update with the longest batch, over the process before it; any corpus."""
    for name in LONGEST:
        for norm in ("none", "sequence"):
            # A process of its own: memory that another case has freed would be found and used.
            with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
                peak = fresh.submit(_peak, name, norm, where).result()
            print(f"{name:<20} norm {norm:<10} {peak:>7,.0f} MiB", flush=True)


def _peak(name: str, norm: str, where: Path) -> float:
    torch.set_num_threads(1)
    config, split = made(*LONGEST[name], where)
    return peak_growth(engine(replace(config, norm=norm), split, where))
