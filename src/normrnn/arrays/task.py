"""Sequences of numbers as a task for the loop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from normrnn.arrays.config import ArrayConfig
from normrnn.arrays.model import ArrayModel, Sequences, build_model
from normrnn.arrays.read import Arrays, Split, describe, read_arrays
from normrnn.engine.evaluation import (
    TRAIN_EVAL,
    EvaluatedTask,
    Evaluator,
    evaluate_run,
    show_rows,
)
from normrnn.engine.ranks import ALONE, Ranks, nothing
from normrnn.engine.statistics import evaluating, own_or_kept, population_statistics
from normrnn.engine.task import EvaluationOptions, Experiment, Loss, Poll, StatisticsKind, Tensors
from normrnn.errors import UserError
from normrnn.runs.rows import Row
from normrnn.runs.store import RunDirectory

__all__ = ["ArrayTask", "evaluate", "load", "open_data", "show"]

Indices = Sequence[int]
"""Numbers of the sequences of a batch."""


def completed(config: ArrayConfig, arrays: Arrays) -> ArrayConfig:
    """Return the config with what the data says."""
    target = "values" if arrays.labels is None else "classes"
    return replace(config, target=target, target_per="step" if arrays.per_step else "sequence")


def open_data(config: ArrayConfig) -> Experiment:
    """Read and split the arrays of the config."""
    arrays = read_arrays(config)
    config = completed(config, arrays)
    if config.normalisation.keeps_statistics and len(arrays.splits["train"].lengths) < 2:
        raise UserError(f"{arrays.where}: norm {config.norm} needs two training sequences")

    def build(device: torch.device) -> ArrayTask:
        return ArrayTask(config, arrays, device)

    sha256 = arrays.sha256
    settings = {"target": config.target, "target_per": config.target_per}
    return Experiment(arrays.where, sha256, sha256, describe(arrays), build, settings)


def training_batches(config: ArrayConfig, count: int, epoch: int) -> list[list[int]]:
    """Return the batches of an epoch; a single sequence left over joins the batch before it."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + epoch)
    order = torch.randperm(count, generator=generator).tolist()
    return _batches(order, config.train.batch)


def _batches(order: list[int], size: int) -> list[list[int]]:
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    if size > 1 and len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [batches[-2] + batches[-1]]
    return batches


class Reader:
    """Batches of a split as tensors."""

    def __init__(self, split: Split, per_step: bool, device: torch.device) -> None:
        self.rows, self.targets = torch.from_numpy(split.rows), torch.from_numpy(split.targets)
        self.lengths, self.starts = torch.from_numpy(split.lengths), torch.from_numpy(split.starts)
        self.per_step, self.device = per_step, device

    def count(self, batch: Indices) -> int:
        """Return the number of targets of a batch."""
        return int(self.lengths[list(batch)].sum()) if self.per_step else len(batch)

    def read(self, batch: Indices, ranks: Ranks = ALONE) -> tuple[Sequences, Tensor] | None:
        """Return this rank's sequences, longest first, and their targets; None if it has none."""
        which = torch.tensor(batch)
        which = which[self.lengths[which].argsort(descending=True, stable=True)]
        which = which[ranks.rank :: ranks.size]
        if not len(which):
            return None
        lengths = self.lengths[which]
        steps = torch.arange(int(lengths[0]))[:, None]
        is_used = steps < lengths
        at = (self.starts[which] + steps)[is_used]
        rows = self.rows[at].float().to(self.device)
        targets = self.targets[at if self.per_step else which].to(self.device)
        if is_used.all():
            return rows.unflatten(0, (len(steps), len(which))), targets
        return PackedSequence(rows, is_used.sum(1)), targets


@dataclass(frozen=True)
class ArrayScore:
    """Loss summed over targets, and errors where there are classes."""

    total: float
    errors: int | None
    count: int

    def row(self, split: str, statistics: StatisticsKind) -> Row:
        """Return the row of metrics.jsonl and evaluation.json."""
        error = {} if self.errors is None else {"error": self.errors / self.count}
        loss = self.total / self.count
        return {
            "split": split,
            "statistics": statistics,
            "loss": loss,
            **error,
            "count": self.count,
        }


class ArrayEvaluator(Evaluator):
    """The evaluations of one data set under one config."""

    config: ArrayConfig

    def __init__(self, config: ArrayConfig, arrays: Arrays, device: torch.device) -> None:
        super().__init__(config, device)
        self.splits = tuple(split for split in ("valid", "test") if split in arrays.splits)
        self.readers = {s: Reader(v, arrays.per_step, device) for s, v in arrays.splits.items()}
        self.is_classes = arrays.labels is not None
        n = len(arrays.splits["train"].lengths)
        some = min(config.evaluation.train_sequences, n)
        self.fixed = [i * n // some for i in range(some)]
        self.has_train_eval = bool(some)

    def _split(self, split: str) -> tuple[Reader, list[list[int]]]:
        """Return the reader of a split and its batches, by length."""
        reader = self.readers["train" if split == TRAIN_EVAL else split]
        which = self.fixed if split == TRAIN_EVAL else range(len(reader.lengths))
        order = sorted(which, key=lambda i: int(reader.lengths[i]))
        return reader, _batches(order, self.config.train.batch)

    @torch.no_grad()
    def score(
        self, model: ArrayModel, split: str, poll: Poll, *, own_statistics: bool = False
    ) -> ArrayScore:
        """Score whole sequences in eval mode."""
        total, errors, count = 0.0, 0, 0
        reader, batches = self._split(split)
        with evaluating(model):
            for batch in batches:
                poll()
                count += reader.count(batch)
                share = reader.read(batch, self.ranks)
                with own_or_kept(model, own_statistics):
                    if share is None:
                        nothing(model)
                        continue
                    loss, wrong, _ = model.loss(*share)
                total += loss.item()
                errors += 0 if wrong is None else int(wrong)
        total, wrong = self.ranks.total([total, errors])
        return ArrayScore(total, int(wrong) if self.is_classes else None, count)

    def calibrated(self, model: ArrayModel, poll: Poll) -> Tensors:
        """Return recalibrated statistics over training batches."""
        reader = self.readers["train"]
        batches = training_batches(self.config, len(reader.lengths), epoch=0)

        def step(_: nn.Module, batch: Indices) -> Tensor:
            poll()
            share = reader.read(batch, self.ranks)
            return nothing(model) if share is None else model.features(share[0])

        some = batches[: self.config.evaluation.recalibrate_batches]
        return population_statistics(model, some, step)

    def scores_batch_statistics(self, split: str) -> bool:
        """One sequence has no statistics of its own in any time step."""
        several = len(self.readers[split].lengths) > 1
        return several or self.config.normalisation.pools != "step"


class ArrayTask(EvaluatedTask):
    """Batches of whole sequences."""

    def __init__(self, config: ArrayConfig, arrays: Arrays, device: torch.device) -> None:
        super().__init__(config, device)
        train = arrays.splits["train"]
        features, longest = train.rows.shape[1], int(train.lengths.max())
        is_even = bool((train.lengths == longest).all())
        steps = config.model.time_steps
        steps = (longest if is_even else 0) if steps < 0 else steps
        self.model = build_model(config, features, arrays.outputs, steps)
        if config.arrays.standardise:
            _standardise(self.model.mean, self.model.scale, train.rows, inverse=True)
        if arrays.labels is None:
            values = train.targets.reshape(len(train.targets), -1)
            _standardise(self.model.target_mean, self.model.target_scale, values)
        self.model.to(device)
        self.evaluator: Evaluator = ArrayEvaluator(config, arrays, device)
        self.is_classes = arrays.labels is not None
        self.reader = Reader(train, arrays.per_step, device)
        self._epoch, self._batches = -1, [[0]]

    def batches(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch, in order."""
        if epoch != self._epoch:
            count = len(self.reader.lengths)
            self._epoch, self._batches = epoch, training_batches(self.config, count, epoch)
        return self._batches

    def updates(self, epoch: int) -> int:
        """Return the number of batches of this epoch."""
        return len(self.batches(epoch))

    def loss(self, epoch: int, index: int) -> Loss:
        """Return the loss of a batch."""
        batch = self.batches(epoch)[index]
        count = self.reader.count(batch)
        share = self.reader.read(batch, self._sharing(batch))
        if share is None:
            total = nothing(self.model)
            errors = total.new_zeros((), dtype=torch.long) if self.is_classes else None
            return Loss(total, count, len(batch), errors)
        total, errors, objective = self.model.loss(*share)
        return Loss(total, count, len(batch), errors, objective)

    def _sharing(self, batch: Indices) -> Ranks:
        """Return the ranks that share a batch: without pooled statistics each needs two."""
        ranks, config = self.ranks, self.config
        if config.train.sync_statistics or config.normalisation.pools != "step":
            return ranks
        return replace(ranks, size=min(ranks.size, max(1, len(batch) // 2)))


def _standardise(mean: Tensor, scale: Tensor, rows: Any, *, inverse: bool = False) -> None:
    """Set the mean and the scale of every column; a constant column has scale 1."""
    deviation = np.std(rows, axis=0, dtype=np.float64)
    deviation[deviation < 1e-8] = 1.0
    mean.copy_(torch.from_numpy(np.mean(rows, axis=0, dtype=np.float64)))
    scale.copy_(torch.from_numpy(1 / deviation if inverse else deviation))


def load(run: RunDirectory, device: torch.device) -> ArrayModel:
    """Return the best model of a run, in eval mode; UserError for a run without one."""
    config, weights = run.config(ArrayConfig), run.weights()
    features, outputs = (len(weights.get(name, ())) for name in ("mean", "target_mean"))
    running = weights.get("rnn.norm_l0.running_mean", torch.empty(0))
    steps = len(running) if running.dim() == 2 else 0
    model = build_model(config, features, outputs, steps)
    run.fill(model, weights)
    return model.to(device).eval()


def evaluate(run: RunDirectory, options: EvaluationOptions) -> dict[str, Any]:
    """Evaluate the splits of the data under all statistics."""
    config, model = run.config(ArrayConfig), load(run, options.device)
    arrays = read_arrays(replace(config, data=options.data) if options.data else config)
    shape = arrays.splits["train"].rows.shape[1], arrays.outputs
    other = completed(config, arrays)
    if (other.target, other.target_per) != (config.target, config.target_per):
        raise UserError(f"{arrays.where} has {other.target} per {other.target_per} as targets")
    if shape != (len(model.mean), len(model.target_mean)):
        raise UserError(
            f"{arrays.where} has {shape[0]} features and {shape[1]} outputs; the network has"
            f" {len(model.mean)} and {len(model.target_mean)}"
        )
    evaluator = ArrayEvaluator(config, arrays, options.device)
    same = arrays.sha256 == config.data_sha256
    return evaluate_run(run, model, evaluator, arrays.sha256, same, arrays.where)


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print losses, and errors or RMSE, under all statistics."""
    columns: dict[str, Any] = {
        "targets": lambda row: f"{row['count']:,}",
        "loss": lambda row: f"{row['loss']:.4f}",
    }
    if "error" in result["rows"][0]:
        columns["accuracy"] = lambda row: f"{1 - row['error']:.2%}"
    else:
        columns["RMSE"] = lambda row: f"{row['loss'] ** 0.5:.4f}"
    show_rows(result, console, columns)
