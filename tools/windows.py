"""From which windows of the training text should a language model's statistics come?

    python -m tools.windows RUN... --data DIR --output results/studies/NAME/windows.json

Of the best model of each run: validation perplexity with the running statistics, and with those
recalibrated over a hundred windows from the beginning of the training text, over those that were
read last before the model was saved, over the last twenty, and over those that would have come
next; and, where the network has dropout or another regulariser, with it on while they are taken.
Records of other runs that the output holds already are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn

from normrnn.config.measure import perplexity
from normrnn.engine.statistics import Tensors, population_statistics, using
from normrnn.engine.task import State
from normrnn.reporting.tables import DASH, Table
from normrnn.runs.names import MODEL
from normrnn.runs.store import RunDirectory
from normrnn.text.config import LanguageConfig
from normrnn.text.model import LanguageModel
from normrnn.text.task import LanguageTask
from normrnn.text.windows import Window
from tools.records import Record, by_kind, command

FILE = "windows.json"
MANY, FEW = 100, 20


def places(read: int, count: int) -> dict[str, list[int]]:
    """Windows by name, after so many of `count` were read; at the end the beginning comes next.

    >>> {name: found[:2] for name, found in places(300, 300).items()}
    {'first': [0, 1], 'last': [200, 201], 'very last': [280, 281], 'next': [0, 1]}
    """
    many, few = min(MANY, count), min(FEW, count)
    return {
        "first": list(range(many)),
        "last": [i % count for i in range(read - many, read)],
        "very last": [i % count for i in range(read - few, read)],
        "next": [i % count for i in range(read, read + many)],
    }


def statistics_over(
    model: LanguageModel, task: LanguageTask, windows: Sequence[int], *, regularised: bool = False
) -> Tensors:
    """Recalibrated over these windows of the training text, with the regularisers off, or on."""
    state: State | None = None

    def step(_: nn.Module, window: Window) -> Tensor:
        nonlocal state
        model.train(regularised)  # the normalisers do as recalibrate asks, whatever the mode
        features, state = model.features(window.read(task.corpus.train)[0], state)
        model.eval()
        return features

    train = task.batches("train")
    return population_statistics(model, (train[i] for i in windows), step)


def record(run: Path, data: str) -> Record:
    """All of one run."""
    directory, cpu = RunDirectory(run), torch.device("cpu")
    config, model = directory.config(LanguageConfig), LanguageTask.load(directory, cpu)
    if config.train.reading != "streams" or not config.normalisation.keeps_statistics:
        raise SystemExit(f"{run} has no streams, or keeps no statistics")
    task = LanguageTask.open(replace(config, data=data), model)
    regularisers = ("dropout", "weight_drop", "zoneout_h", "zoneout_c")
    changed = any(getattr(config.model, name) for name in regularisers)
    if directory.saved_statistics != "running":
        raise SystemExit(f"{run} was saved with recalibrated statistics: the running ones are gone")
    updates = int(directory.tensors_metadata(MODEL)["updates"])
    count = task.batches("train").common  # type: ignore[attr-defined]
    read = (updates - 1) % count + 1
    found: dict[str, Tensors] = {"running": {}}
    torch.manual_seed(config.seed)
    for name, windows in places(read, count).items():
        found[name] = statistics_over(model, task, windows)
        if changed and name != "next":
            on = statistics_over(model, task, windows, regularised=True)
            found[f"{name}, regularisers on"] = on
    valid = {}
    for name, statistics in found.items():
        with using(model, statistics):
            valid[name] = task.score(model, "valid").loss
    return {
        "recipe": config.recipe,
        "norm": config.norm,
        "seed": config.seed,
        "updates": updates,
        "regularised": changed,
        "read": read,
        "windows": count,
        "valid": valid,
    }


def _kind(one: Record) -> tuple[str, str, bool, int, int]:
    return one["recipe"], one["norm"], one["regularised"], one["read"], one["windows"]


def tables(records: Sequence[Record]) -> list[Table]:
    """One, with a row per kind of run and of statistics, the mean over its seeds."""
    rows = [
        [_name(some[0]), str(len(some)), name, *_figures(some, name)]
        for _, some in by_kind(records, _kind)
        for name in some[0]["valid"]
    ]
    columns = ["best model", "seeds", "statistics over", "valid perplexity"]
    columns += ["minus running", "of each seed"]
    note = (
        f"Running statistics, and recalibrated ones over the first {MANY} windows of the training"
        f" text, the last {MANY} and {FEW} that were read before the model was saved, and the next"
        f" {MANY}; regularisers are off while they are taken unless said."
    )
    return [Table("From which windows statistics should come", columns, rows, note)]


def _name(one: Record) -> str:
    where = f"after {one['read']:,} of {one['windows']:,} windows"
    return f"{one['recipe']}, {one['norm']}, {where}"


def _figures(some: Sequence[Record], name: str) -> list[str]:
    losses = [(one["valid"][name], one["valid"]["running"]) for one in some]
    shown = [[perplexity(loss) for loss in pair] for pair in losses]
    apart = [own - running for own, running in shown]
    if name == "running":
        return [f"{mean(own for own, _ in shown):.2f}", DASH, DASH]
    each = ", ".join(f"{one:+.2f}" for one in apart)
    return [f"{mean(own for own, _ in shown):.2f}", f"{mean(apart):+.2f}", each]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""

    def measuring(data: str) -> Callable[[Path], Record]:
        return partial(record, data=data)

    command(__doc__, measuring, _kind, tables, arguments)


if __name__ == "__main__":
    main()
