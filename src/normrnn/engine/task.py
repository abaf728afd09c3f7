"""A task: a data set, a network and a measure. Training, evaluation and export know only this.

A subclass reads its data in `__init__`, and defines how a network is made (`network`) and how
sequences are read (`read`). Its config class names it as `task`, and says what the loss is shown
as (`Config.measure`).
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from normrnn.config.base import Config
from normrnn.engine.model import Loss, State, Sums
from normrnn.engine.ranks import ALONE, Ranks, current, empty_loss
from normrnn.errors import UserError
from normrnn.nn import batch_statistics, recalibrate
from normrnn.nn.recalibrate import NothingFinite, eval_mode
from normrnn.runs.environment import built
from normrnn.runs.records import Row, finite_rows
from normrnn.runs.store import RunDirectory

Tensors = dict[str, Tensor]
StatisticsKind = Literal["running", "recalibrated", "batch"]
"""Of an evaluation: the buffers as training left them; population statistics over training batches,
without dropout; each batch's own, as the authors' code validated."""
Models = Mapping[StatisticsKind, Any]
"""A network with its running statistics, and a copy with recalibrated ones."""
BEST_VALID = "best_valid"  # split of the selected model's rows on validation data at the end
Split = str
""""train", "valid" and "test", and "train_eval": training data that is scored in eval mode."""


@dataclass(frozen=True)
class Batch:
    """Sequences of a batch, or this rank's share of them."""

    inputs: Any  # None where the rank has no sequence of the batch
    targets: Any
    count: int  # targets, on all ranks
    sequences: int  # sequences or streams, on all ranks
    is_full: bool = True  # False for a remainder, which is left out of means over batches


class Task:
    """Base class of tasks.

    A batch is identified by its epoch and number, so resuming needs no state of the data; what
    flows from batch to batch (a carried LSTM state) is in `state_dict`. Evaluations change neither
    the model nor a random number generator.
    """

    splits: Sequence[Split] = ("valid",)  # held out; rows of the first select the model
    has_train_eval = False  # whether a split "train_eval" is scored at every validation
    validates_all_statistics = False  # whether validations use recalibrated and batch ones too
    per_step = True  # whether every step of a sequence has a target, or every sequence one
    carries_state = False  # whether a batch starts from the state after the batch before it
    pool = 1  # training batches drawn together and sorted by length
    calibration_batches = 50  # training batches behind recalibrated statistics
    lengths: Mapping[str, Sequence[int]]  # of every sequence, by split
    model: Any

    def __init__(self, config: Any, sha256: str, where: str = "", source: str = "") -> None:
        """`sha256` stands for the data: a run resumes only with the same. `where` is the data's
        place as config.json keeps it, `source` a description."""
        self.config = config
        self.measure = config.loss_measure
        self.sha256 = sha256
        self.where = where or config.data
        self.source = source or self.where
        self.settings: dict[str, Any] = {}  # fields of the config that the data determines
        # What a network needs beside its weights: entries of the header of its file.
        self.metadata: dict[str, str] = {}
        self.sizes: dict[str, Any] = {}  # arguments of `network` that the data determines
        self.device = torch.device("cpu")
        self.ranks = current()
        self.state: State | None = None
        self._batches: tuple[int, Sequence[Any]] = (-1, ())

    # The network

    network: Any
    """Called with the config and `sizes`; makes a network. That has `loss(inputs, targets) -> Loss`
    (with a third argument, the state, if it carries one). It may have `features(inputs, state) ->
    (rows, state)`, all before its head, which then recalibrates statistics in less time."""

    # Entries of `sizes` that are the length of a tensor of the network, and its name.
    size_tensors: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def saved_sizes(cls, weights: Tensors, metadata: Mapping[str, str]) -> dict[str, Any]:  # noqa: ARG003
        """Return `sizes` of a saved network."""
        return {size: len(weights.get(name, ())) for size, name in cls.size_tensors.items()}

    def initialise(self, model: Any) -> None:
        """Set buffers of a new network that depend on the data."""

    def build(self, device: torch.device) -> Self:
        """Make a new network on the device."""
        self.device = device
        model = built(partial(self.network, self.config, **self.sizes))
        self.initialise(model)
        self.model = model.to(device)
        return self

    @classmethod
    def open(cls, config: Any, model: Any = None) -> Self:
        """Read the data of a config; UserError if it does not fit the model to evaluate on it."""
        task = cls(config)  # type: ignore[call-arg]
        if model is None:
            task.check_training()
        else:
            fields = {name: getattr(config, name) for name in task.settings}
            weights = model.state_dict()
            fields |= {size: len(weights[name]) for size, name in cls.size_tensors.items()}
            for name, value in fields.items():
                if (found := {**task.settings, **task.sizes}[name]) != value:
                    raise UserError(f"{task.where} has {name} {found}; the network has {value}")
        return task

    def check_training(self) -> None:
        """Raise UserError if the data cannot be trained on."""
        norm, count = self.config.normalisation, len(self.lengths["train"])
        if count < 1 + norm.keeps_statistics:
            raise UserError(f"{self.where}: {count} training sequences are too few ({norm.name})")

    @classmethod
    def load(cls, run: RunDirectory, device: torch.device) -> Any:
        """Return the best model of a run, in eval mode."""
        config, (weights, metadata) = run.config(), run.read_model()
        model = built(partial(cls.network, config, **cls.saved_sizes(weights, metadata)))
        run.load_weights(model, weights)
        return model.to(device).eval()

    def completed(self, config: Config) -> Config:
        """Return the config with the fields that the data determines, and the hash of the data."""
        return replace(config, data_sha256=self.sha256, **self.settings)

    # Batches

    def read(self, split: Split, indices: list[int]) -> tuple[Any, Any]:
        """Return inputs and targets of some sequences, longest first, on the task's device."""
        raise NotImplementedError

    def batches(self, split: Split, epoch: int = 0) -> Sequence[Any]:
        """Return what identifies each batch of a split, in order: training batches of an epoch are
        shuffled, others sorted by length."""
        lengths, train = self.lengths[split], self.config.train
        if split == "train":
            seed = self.config.seed
            return shuffled_batches(lengths, train.batch, self.pool, seed=seed, epoch=epoch)
        return sorted_batches(lengths, train.batch)

    def batch(self, split: Split, key: Any, ranks: Ranks = ALONE) -> Batch:
        """Read a rank's share of a batch: every `ranks.size`-th sequence by length."""
        lengths = self.lengths[split]
        ordered = sorted(key, key=lambda i: (lengths[i], i), reverse=True)
        share = ordered[ranks.rank :: ranks.size] if ranks.rank < ranks.size else []
        inputs, targets = self.read(split, share) if share else (None, None)
        count = sum(lengths[i] for i in key) if self.per_step else len(key)
        return Batch(inputs, targets, count, len(key))

    # Training

    def updates(self, epoch: int) -> int:
        """Return the number of training batches of an epoch (0-based)."""
        if self._batches[0] != epoch:
            self._batches = epoch, self.batches("train", epoch)
        return len(self._batches[1])

    def reset(self) -> None:
        """Forget the carried state: a segment begins."""
        self.state = None

    def loss(self, epoch: int, index: int) -> Loss:
        """Return the differentiable loss of a training batch; carries the state on."""
        self.updates(epoch)
        key = self._batches[1][index]
        batch = self.batch("train", key, self._sharing(key))
        loss = self.forward(self.model, batch, self.state)
        if loss.state is not None:
            self.state = tuple(s.detach() for s in loss.state)
        by_time = self.config.optimizer.loss == "sum_over_time"
        objective = loss.total if loss.objective is None else loss.objective
        objective = objective / (batch.sequences if by_time else batch.count)
        return replace(loss, state=None, count=batch.count, objective=objective)

    def forward(self, model: Any, batch: Batch, state: State | None = None) -> Loss:
        """Return the loss of a batch under a network."""
        if batch.inputs is None:
            return Loss(empty_loss(model))
        if self.carries_state:
            return model.loss(batch.inputs, batch.targets, state)
        return model.loss(batch.inputs, batch.targets)

    def _sharing(self, key: Any) -> Ranks:
        """Return the ranks that share a training batch. Where each normalises its own share by
        time steps, one sequence has no statistics."""
        ranks, config = self.ranks, self.config
        pools = config.normalisation.pools
        if ranks.size == 1 or config.train.sync_statistics or pools != "step":
            return ranks
        return replace(ranks, size=min(ranks.size, max(1, len(key) // 2)))

    def state_dict(self) -> dict[str, Any]:
        """Return what flows between batches, of all ranks."""
        batch = self.config.train.batch
        gather = self.ranks.gather_states
        return {"state": self.state and tuple(gather(s, batch) for s in self.state)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Resume from `state_dict`; ValueError if it does not fit."""
        state = saved["state"]
        if state is not None:
            batch = self.config.train.batch
            if any(s.dim() != 3 or s.shape[1] != batch for s in state):
                raise ValueError("its state has another size")
            share = self.ranks.share(batch)
            state = tuple(s[:, share].to(self.device).contiguous() for s in state)
        self.state = state

    # Evaluation

    @torch.no_grad()
    def score(
        self,
        model: Any,
        split: Split,
        kind: StatisticsKind = "running",
        keys: Iterable | None = None,
    ) -> Row:
        """Score a split, or some batches of it, in eval mode, with the model's statistics, or each
        batch's own if `kind` is "batch"; a row of metrics.jsonl and evaluation.json."""
        pools = self.config.normalisation.pools
        state: State | None = None
        scored: list[tuple[float, int, int | None, bool]] = []
        with eval_mode(model):
            for key in self.batches(split) if keys is None else keys:
                batch = self.batch(split, key)
                if state is not None:  # the streams of a shorter remainder are the first ones
                    state = tuple(s[:, : batch.inputs.shape[1]].contiguous() for s in state)
                has_own = kind == "batch" and (batch.sequences > 1 or pools != "step")
                with batch_statistics(model) if has_own else nullcontext():
                    loss = self.forward(model, batch, state)
                state = loss.state if self.carries_state else None
                errors = None if loss.errors is None else int(loss.errors)
                scored.append((loss.total.item(), batch.count, errors, batch.is_full))
        sums, has_full = Sums(), any(is_full for *_, is_full in scored)
        for total, count, errors, is_full in scored:
            sums.add(total, count, errors, self.measure, is_full=is_full or not has_full)
        return {"split": split, "statistics": kind, **sums.row(self.measure)}

    def rows(self, models: Models, split: Split, batch_statistics: bool = True) -> Iterator[Row]:
        """Yield a row per kind of statistics, then one with each batch's own, where these mean
        something: a network that predicts its inputs must not see them, and one sequence has no
        statistics of a time step."""
        for kind, model in models.items():
            yield self.score(model, split, kind)
        norm = self.config.normalisation
        sees_inputs = norm.looks_ahead and self.config.predicts_inputs
        is_alone = norm.pools == "step" and self.rows_at_once(split) < 2
        if batch_statistics and norm.keeps_statistics and not (sees_inputs or is_alone):
            yield self.score(next(iter(models.values())), split, "batch")

    def rows_at_once(self, split: Split) -> int:
        """Return how many sequences of a split are scored together at most."""
        return len(self.lengths[split])

    def calibration(self) -> Iterable[Any]:
        """Return the training batches behind recalibrated statistics."""
        return self.batches("train", 0)

    def population(self, model: Any) -> Models:
        """Return the model, and a copy with statistics recalibrated over training batches, or the
        model's own if its activations are not finite; no copy of a network that keeps none."""
        some = list(islice(self.calibration(), self.calibration_batches))
        if not (some and self.config.normalisation.keeps_statistics):
            return {"running": model}
        state: State | None = None

        def step(copied: Any, key: Any) -> None:
            nonlocal state
            batch = self.batch("train", key)
            if hasattr(copied, "features"):  # without the head
                _, state = copied.features(batch.inputs, state if self.carries_state else None)
            else:
                state = self.forward(copied, batch, state).state

        shared = {id(parameter): parameter for parameter in model.parameters()}
        recalibrated = copy.deepcopy(model, shared)
        with suppress(NothingFinite):
            recalibrate(recalibrated, some, step=step)
        return {"running": model, "recalibrated": recalibrated}

    def validate(self) -> tuple[list[Row], float]:
        """Return the rows of a validation, and the loss that selects the model.

        Inside a recurrence errors of statistics add up over the steps, and running ones are noisy:
        there recalibrated ones select, unless the task validates all kinds.
        """
        norm, every = self.config.normalisation, self.validates_all_statistics
        recalibrates = norm.keeps_statistics and norm.acts == "step"
        models: Models = {"running": self.model}
        if every or recalibrates:
            models = self.population(self.model)
        if "recalibrated" in models and not every:
            models = {"recalibrated": models["recalibrated"]}
        rows = list(self.rows(models, self.splits[0], batch_statistics=every))
        loss = rows[0]["loss"]
        if self.has_train_eval:
            kind, model = next(iter(models.items()))
            rows.append(self.score(model, "train_eval", kind))
        return finite_rows(rows), loss

    def test(self, models: Models) -> list[Row]:
        """Return the rows of the selected model on the held-out splits; those of the first are
        called `best_valid`."""
        return finite_rows(
            {**row, "split": BEST_VALID if split == self.splits[0] else split}
            for split in self.splits
            for row in self.rows(models, split)
        )

    def extra_rows(self, models: Models) -> list[Row]:  # noqa: ARG002
        """Return rows that only `normrnn evaluate` computes, and that take time."""
        return []


# Sequences in batches of similar length, in an order that seed and epoch determine.


def shuffled_batches(
    lengths: Sequence[int], batch: int, pool: int = 1, *, seed: int, epoch: int
) -> list[list[int]]:
    """Return the numbers of all sequences once, in batches of similar length.

    Pools of `pool` batches are drawn at random and sorted by length; their batches come in random
    order. Only the last batch drawn may be smaller; a single sequence left over joins the batch
    before it, because statistics of a time step need two.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches: list[list[int]] = []
    for start in range(0, len(order), pool * batch):
        some = sorted(order[start : start + pool * batch], key=lambda i: (lengths[i], i))
        batches += [some[i : i + batch] for i in range(0, len(some), batch)]
    batches = _join_single(batches, batch)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def sorted_batches(lengths: Sequence[int], batch: int) -> list[list[int]]:
    """Return the numbers of all sequences once, by length."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    return _join_single([order[i : i + batch] for i in range(0, len(order), batch)], batch)


def evenly_spread(count: int, total: int) -> list[int]:
    """Return `count` of `total` numbers, or all of them if there are fewer."""
    count = min(count, total)
    return [i * total // count for i in range(count)]


def _join_single(batches: list[list[int]], batch: int) -> list[list[int]]:
    if batch > 1 and len(batches) > 1 and len(batches[-1]) == 1:
        return [*batches[:-2], batches[-2] + batches[-1]]
    return batches


def better_kind(rows: Iterable[Row]) -> StatisticsKind:
    """Return the kind of statistics with the lowest validation loss of the selected model.

    Batch statistics are left out: they depend on the rest of a batch. Running ones win a tie.
    """
    losses = {row["statistics"]: row["loss"] for row in rows if row["split"] == BEST_VALID}
    recalibrated = losses.get("recalibrated", math.inf) < losses.get("running", math.inf)
    return "recalibrated" if recalibrated else "running"
