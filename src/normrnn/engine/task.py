"""The seam between the loop and an experiment: what a task must offer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from rich.console import Console
from torch import Tensor, nn

from normrnn.config.base import Config
from normrnn.runs.rows import Row
from normrnn.runs.store import RunDirectory

Poll = Callable[[], None]
"""Called between batches of an evaluation; raises when the run was asked to stop."""
Tensors = dict[str, Tensor]
StatisticsKind = Literal["running", "recalibrated", "batch"]


@dataclass(frozen=True)
class Loss:
    """Cross entropy of one batch, summed over `count` tokens or frames of `sequences` streams."""

    nats: Tensor
    count: int
    sequences: int
    errors: Tensor | None = None
    """Targets whose most probable class was wrong, where that is counted; on the device, as `nats`:
    asking for the numbers would be to wait for it."""
    objective: Tensor | None = None
    """What is differentiated instead of `nats`: the same loss in other units."""


@dataclass(frozen=True)
class Validation:
    """Rows for metrics.jsonl, and the loss with running statistics, which selects the model."""

    rows: list[Row]
    loss: float


@dataclass(frozen=True)
class Experiment:
    """Data that was found and read, and the task to train on it."""

    where: str
    """Its place, as config.json keeps it."""
    sha256: str
    """Stands for its content: a run goes on only with the same."""
    older_sha256: str
    """The same as older versions put it, for runs that they began."""
    source: str
    """The data in words."""
    build: "Callable[[torch.device], Task]"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config that the data determines."""

    def completed(self, config: Config, sha256: str = "") -> Config:
        """Return the config with the fields that the data determines, and a hash of it."""
        return replace(config, data_sha256=sha256 or self.sha256, **self.settings)


@dataclass(frozen=True)
class EvaluationOptions:
    """What `normrnn evaluate` was asked for."""

    data: str
    """Where the data is now, if not where it was in training; or other data."""
    device: torch.device
    one_stream: bool
    """Also read a test text as one stream."""


class Task(Protocol):
    """An experiment as the loop sees it.

    A batch is known by its epoch and number, so the position in the data needs no state of its
    own; what does flow from batch to batch (a carried LSTM state) is in `state_dict`.
    Evaluations change neither the model nor a random number generator. One with `shares_batches =
    True` gives the loss of its rank's share of a batch, and can be trained by several processes.
    """

    @property
    def model(self) -> nn.Module:
        """The network in training."""
        ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """What a model needs beside its weights, by its name in the run directory."""
        ...

    def updates(self, epoch: int) -> int:
        """Batches of this epoch (0-based)."""
        ...

    def reset(self) -> None:
        """A segment begins: forget the carried state."""
        ...

    def loss(self, epoch: int, index: int) -> Loss:
        """Differentiable loss of a batch; carries the state on."""
        ...

    def validate(self, poll: Poll) -> Validation:
        """Rows of all validations due at the end of a segment."""
        ...

    def population(self, model: nn.Module, poll: Poll) -> Tensors:
        """Recalibrated statistics of a model over training batches; empty if it keeps none."""
        ...

    def test(
        self, model: nn.Module, kinds: Mapping[StatisticsKind, Tensors], poll: Poll
    ) -> list[Row]:
        """Rows of the selected model, splits `best_valid` and, where there is one, `test`.

        One row for each kind of statistics; empty tensors stand for the model's own.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """What flows between batches, as plain values and tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        ...


class TaskModule(Protocol):
    """The module that a config class names as its `task`."""

    def open_data(self, config: Any) -> Experiment:
        """The data of a config, found and read."""
        ...

    def load(self, run: RunDirectory, device: torch.device) -> nn.Module:
        """The best model of a run, in eval mode on the device."""
        ...

    def evaluate(self, run: RunDirectory, options: EvaluationOptions) -> dict[str, Any]:
        """All that can be said about that model: the task's part of evaluation.json."""
        ...

    def exported_loss(self, run: RunDirectory, data: str, session: Any) -> float:
        """Nats per target of the run's validation data, `data` if that moved, of its model as an
        ONNX session. Only of tasks whose networks have `plain_parts`."""
        ...

    def show(self, result: Mapping[str, Any], console: Console) -> None:
        """Print evaluation.json for a person."""
        ...


def never() -> None:
    """A `Poll` of an evaluation that nobody but Ctrl-C itself asks to stop."""
