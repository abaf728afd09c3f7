"""Evaluation that data sets share: scores under each kind of statistics, validation, test."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn

from normrnn.config.base import Config
from normrnn.engine.ranks import current
from normrnn.engine.ranks import evaluating as evaluating_ranks
from normrnn.engine.statistics import BEST_VALID, kinds_of_run, recalibrated_elsewhere, using
from normrnn.engine.task import Poll, StatisticsKind, Tensors, Validation, never
from normrnn.errors import UserError
from normrnn.norms import statistics_shown
from normrnn.runs.rows import Row, finite_rows, left_out
from normrnn.runs.store import RunDirectory

TRAIN_EVAL = "train_eval"
"""Split of training data that is scored in eval mode."""


class Score(Protocol):
    """The result of scoring a split."""

    def row(self, split: str, statistics: StatisticsKind) -> Row:
        """Return the row of metrics.jsonl and evaluation.json."""
        ...


class Evaluator(ABC):
    """Evaluates models on the splits of one data set under one config."""

    splits: tuple[str, ...]
    """Held-out splits: "valid", and "test" where there is one."""
    has_train_eval: bool

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.ranks = evaluating_ranks(config.normalisation)

    @abstractmethod
    def score(self, model: Any, split: str, poll: Poll, *, own_statistics: bool = False) -> Score:
        """Score a split in eval mode, with the model's statistics or each batch's own."""

    @abstractmethod
    def calibrated(self, model: Any, poll: Poll) -> Tensors:
        """Return recalibrated statistics over training batches."""

    def scores_batch_statistics(self, split: str) -> bool:  # noqa: ARG002
        """Whether the loss with each batch's own statistics is meaningful."""
        return True

    def population(self, model: Any, poll: Poll) -> Tensors:
        """Return recalibrated statistics; empty for a network that keeps none."""
        keeps = self.config.normalisation.keeps_statistics
        return self.calibrated(model, poll) if keeps else {}

    def rows(
        self,
        model: Any,
        split: str,
        kinds: Mapping[StatisticsKind, Tensors],
        poll: Poll,
    ) -> Iterator[Row]:
        """Yield a row per kind of statistics, batch statistics last."""
        for kind, statistics in kinds.items():
            with using(model, statistics):
                yield self.score(model, split, poll).row(split, kind)
        if self.config.normalisation.keeps_statistics and self.scores_batch_statistics(split):
            score = self.score(model, split, poll, own_statistics=True)
            yield score.row(split, "batch")


class EvaluatedTask:
    """The part of a `Task` that follows from its evaluator. Nothing flows between its batches."""

    shares_batches = True
    evaluator: Evaluator
    model: Any

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config: Any = config
        self.device = device
        self.ranks = current()

    @property
    def files(self) -> Mapping[str, bytes]:
        """None: all that a model needs is in its buffers."""
        return {}

    def reset(self) -> None:
        """Every sequence starts from the zero state."""

    def validate(self, poll: Poll) -> Validation:
        """Score the validation set and the fixed training sequences with running statistics."""
        splits = ("valid", TRAIN_EVAL) if self.evaluator.has_train_eval else ("valid",)
        scores = [(split, self.evaluator.score(self.model, split, poll)) for split in splits]
        rows = [score.row(split, "running") for split, score in scores]
        return Validation(finite_rows(rows), rows[0]["loss"])

    def population(self, model: nn.Module, poll: Poll) -> Tensors:
        """Return recalibrated statistics over training batches."""
        return self.evaluator.population(model, poll)

    def test(
        self, model: nn.Module, kinds: Mapping[StatisticsKind, Tensors], poll: Poll
    ) -> list[Row]:
        """Score the selected model on every held-out split."""
        return finite_rows(
            {**row, "split": BEST_VALID if split == "valid" else split}
            for split in self.evaluator.splits
            for row in self.evaluator.rows(model, split, kinds, poll)
        )

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


def evaluate_run(
    run: RunDirectory, model: Any, evaluator: Evaluator, sha256: str, same: bool, where: object
) -> dict[str, Any]:
    """Return the task's part of evaluation.json: every split under all statistics."""
    kinds = kinds_of_run(run, lambda: evaluator.population(model, never))
    rows = [row for split in evaluator.splits for row in evaluator.rows(model, split, kinds, never)]
    if evaluator.has_train_eval:
        score = evaluator.score(model, TRAIN_EVAL, never)
        rows.append(score.row(TRAIN_EVAL, next(iter(kinds))))
    finite = finite_rows(rows)
    if not finite:
        raise UserError(f"the model of {run.path} gives no finite loss on {where}")
    return {
        "data_sha256": sha256,
        "same_data": same,
        "rows": finite,
        "notes": left_out(rows) + recalibrated_elsewhere(same, kinds, where),
    }


def show_rows(
    result: Mapping[str, Any], console: Console, columns: Mapping[str, Callable[[Row], str]]
) -> None:
    """Print the rows of an evaluation as a table, and its notes."""
    title = f"{result['recipe']}, norm {result['norm']}, seed {result['seed']}"
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)
    shown: Sequence[str] = ("set", "statistics")
    for name in (*shown, *columns):
        table.add_column(name, justify="left" if name in shown else "right")
    for row in result["rows"]:
        figures = (column(row) for column in columns.values())
        table.add_row(row["split"], statistics_shown(result, row), *figures)
    console.print(table)
    for note in result["notes"]:
        console.print(note)
