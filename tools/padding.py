"""How far the statistics that a speech network keeps are from those that it meets.

    python -m tools.padding RUN... --data DIR --output results/studies/NAME/statistics.json

Runs with and without `--model.count-padding`. Of each: the share of padding in an epoch's batches,
the development set's cross entropy under running, recalibrated and batch statistics, and how far
the kept statistics are from those of training batches (as training counted them) and from those of
development utterances alone, which have no padding: the mean's distance in standard deviations, the
spread's as the logarithm of its ratio, both averaged over features and batches, per layer. Then
what counting padding does to the cross entropy, paired by seed. Records of other runs that the
output holds already are kept.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from normrnn.engine.ranks import ALONE
from normrnn.engine.statistics import both_kinds, evaluating
from normrnn.engine.task import Split
from normrnn.nn.batchnorm import Normaliser
from normrnn.nn.normaliser import GateNorm
from normrnn.ops.layout import Steps
from normrnn.reporting.tables import Table
from normrnn.runs.store import RunDirectory
from normrnn.speech.config import SpeechConfig
from normrnn.speech.corpus import SpeechCorpus, read_speech
from normrnn.speech.model import AcousticModel
from normrnn.speech.task import SpeechTask

Record = dict[str, Any]
FILE = "statistics.json"
BATCHES = 40
STATISTICS = ("running", "recalibrated", "batch")
CPU = torch.device("cpu")


def padded_share(batches: Sequence[Sequence[int]]) -> float:
    """Return the share of padding in padded batches of these lengths.

    >>> padded_share([[4, 2]])
    0.25
    """
    real = sum(length for batch in batches for length in batch)
    return 1 - real / sum(len(batch) * max(batch) for batch in batches)


def distance(own: Tensor, kept: tuple[Tensor, Tensor], zeros: int = 0) -> tuple[float, float]:
    """Of rows, with so many zeros more, from a mean and a variance: in standard deviations, and
    the absolute logarithm of the ratio of the standard deviations; averaged over features."""
    there = len(own) / (len(own) + zeros)
    own = own.double()
    middle = own.mean(0) * there
    spread = own.square().mean(0) * there - middle.square()
    away = (middle - kept[0]).abs() / kept[1].sqrt()
    ratio = (spread.clamp_min(1e-12) / kept[1]).log().abs() / 2
    return away.mean().item(), ratio.mean().item()


@torch.no_grad()
def distances(
    model: AcousticModel,
    task: SpeechTask,
    split: Split,
    batches: Sequence[Sequence[int]],
    zeros: Callable[[Steps], int],
) -> dict[str, list[float]]:
    """By layer, averaged over the batches, with so many zeros counted in each."""
    found: dict[str, list[tuple[float, float]]] = {}

    def hook(name: str, kept: tuple[Tensor, Tensor]) -> Callable[..., None]:
        def look(_: torch.nn.Module, given: tuple[Tensor, Steps]) -> None:
            rows, steps = given
            found.setdefault(name, []).append(distance(rows, kept, zeros(steps)))

        return look

    names = {module: name for name, module in model.named_modules()}
    hooks = [
        # Before the padding is put in, where that is counted.
        norm.register_forward_pre_hook(hook(names[norm], _kept(norm)), prepend=True)
        for norm in model.rnn.normalisers()
    ]
    try:
        with evaluating(model):
            for batch in batches:
                model.features(task.batch(split, batch, ALONE).inputs)
    finally:
        for one in hooks:
            one.remove()
    return {name: [mean(column) for column in zip(*v, strict=True)] for name, v in found.items()}


def _kept(norm: GateNorm) -> tuple[Tensor, Tensor]:
    kept = norm.test_statistics(1) if isinstance(norm, Normaliser) else None
    if kept is None:
        raise SystemExit("a network that keeps no statistics is at no distance from them")
    return kept


def record(run: Path, corpus: SpeechCorpus) -> Record:
    """All of one run."""
    directory = RunDirectory(run)
    config, model = directory.config(SpeechConfig), SpeechTask.load(directory, CPU)
    counts = config.model.count_padding
    task = SpeechTask(config, corpus)
    batches, lengths = task.batches("train"), task.lengths["train"]

    def padding(steps: Steps) -> int:
        return counts * (steps.time * steps.batch - steps.rows)

    dev = [[i] for i in range(len(corpus.dev.lengths))]
    saved = directory.saved_statistics
    kinds: Any = {saved: {}} if saved == "recalibrated" else both_kinds(task.population(model))
    rows = task.rows(model, "valid", kinds)
    return {
        "norm": config.norm,
        "seed": config.seed,
        "counted": counts,
        "batch": config.train.batch,
        "pieces": config.train.piece_frames,
        "pool": config.train.pool,
        "padding": padded_share([[lengths[i] for i in batch] for batch in batches]),
        "valid": {row["statistics"]: row["loss"] for row in rows},
        "training": distances(model, task, "train", batches[:BATCHES], padding),
        "alone": distances(model, task, "valid", dev, lambda _: 0),
    }


def _kind(one: Record) -> tuple[int, ...]:
    return tuple(one[name] for name in ("pieces", "batch", "pool", "counted"))


def table(records: Sequence[Record]) -> Table:
    """A row per kind of run, the mean over its seeds."""
    kinds: dict[tuple[int, ...], list[Record]] = {}
    for one in records:
        kinds.setdefault(_kind(one), []).append(one)
    several = [kinds[kind] for kind in sorted(kinds)]
    rows = [[_name(some), str(len(some)), *_figures(some)] for some in several]
    columns = ["statistics", "seeds", "padding", *(f"dev FCE, {kind}" for kind in STATISTICS)]
    columns += [f"{of}, {what}" for of in ("batches", "utterance") for what in ("mean", "spread")]
    note = (
        "How far kept statistics are from those of training batches, counted as in training, and"
        " of single development utterances: means in standard deviations, spreads as the logarithm"
        " of the ratio; averaged over layers, features and batches."
    )
    return Table("What padding does to the statistics", columns, rows, note)


def _batches(one: Record) -> str:
    return f"pieces of {one['pieces']}, batch {one['batch']}, pool {one['pool']}"


def _name(some: Sequence[Record]) -> str:
    counts = "with padding" if some[0]["counted"] else "unpadded frames"
    return f"{counts}, {_batches(some[0])}"


def _figures(some: Sequence[Record]) -> list[str]:
    shown = [f"{mean(one['padding'] for one in some):.0%}"]
    for kind in STATISTICS:
        shown.append(f"{mean(one['valid'][kind] for one in some):.3f}")
    for where in ("training", "alone"):
        for i in range(2):
            layers = [layer[i] for one in some for layer in one[where].values()]
            shown.append(f"{mean(layers):.3f}")
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure runs, write their records and print the table. A run is known by kind and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args(arguments)
    old = given.output.read_text(encoding="utf-8") if given.output.exists() else "[]"
    corpus = read_speech(given.data)
    every = (*json.loads(old), *(record(run, corpus) for run in given.runs))
    latest = {(_kind(one), one["seed"]): one for one in every}
    records = [latest[key] for key in sorted(latest)]
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    print(table(records).markdown())


if __name__ == "__main__":
    main()
