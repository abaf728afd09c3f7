"""A third task: a coin that comes up heads three times in four."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from normrnn.config.base import Config
from normrnn.config.measure import Measure, bits
from normrnn.engine.task import (
    EvaluationOptions,
    Experiment,
    Loss,
    Poll,
    StatisticsKind,
    Tensors,
    Validation,
)
from normrnn.runs.store import RunDirectory

TOSSES = 40


@dataclass(frozen=True, kw_only=True)
class CoinConfig(Config):
    noun: ClassVar[str] = "a coin"
    task: ClassVar[str] = "tests.toy_task"
    weight: float = 0.0
    """Of the coin."""

    @classmethod
    def measure(cls, settings: Mapping[str, Any]) -> Measure:
        return Measure(
            name="surprise",
            long=f"surprise, weight {settings['weight']:g}",
            axis="bits",
            of=bits,
            digits=2,
            log=False,
            unit="tosses",
            held_out="valid",
            columns={"surprise": bits},
        )


def coin() -> CoinConfig:
    """A coin, to show what a task is."""
    return CoinConfig(recipe="coin", data="a pocket", epochs=2)


class Coin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.zeros(()))

    def loss(self) -> torch.Tensor:
        heads = (torch.arange(TOSSES) % 4 > 0).float()
        return F.binary_cross_entropy_with_logits(self.logit.expand(TOSSES), heads, reduction="sum")


class CoinTask:
    def __init__(self, config: CoinConfig) -> None:
        self.config, self.model = config, Coin()
        self.files: Mapping[str, bytes] = {}

    def updates(self, epoch: int) -> int:
        return 3 + epoch

    def reset(self) -> None: ...

    def loss(self, epoch: int, index: int) -> Loss:
        assert index < self.updates(epoch)
        return Loss(self.model.loss(), TOSSES, TOSSES)

    def validate(self, poll: Poll) -> Validation:
        poll()
        row = _row(self.model)
        return Validation([row], row["loss"])

    def population(self, model: nn.Module, poll: Poll) -> Tensors:  # noqa: ARG002
        poll()
        return {}

    def test(
        self, model: nn.Module, kinds: Mapping[StatisticsKind, Tensors], poll: Poll
    ) -> list[dict[str, Any]]:
        poll()
        assert isinstance(model, Coin)
        assert kinds == {"running": {}}
        return [_row(model) | {"split": "best_valid"}]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def _row(model: Coin) -> dict[str, Any]:
    loss = model.loss().item() / TOSSES
    return {"split": "valid", "statistics": "running", "loss": loss, "count": TOSSES}


def open_data(config: CoinConfig) -> Experiment:
    sha256 = hashlib.sha256(config.data.encode()).hexdigest()
    return Experiment(config.data, sha256, sha256, "a pocket", lambda _: CoinTask(config))


def load(run: RunDirectory, device: torch.device) -> Coin:
    model = Coin()
    run.fill(model, run.weights())
    return model.to(device).eval()


def evaluate(run: RunDirectory, options: EvaluationOptions) -> dict[str, Any]:
    config = run.config()
    rows = [config.own_measure.row(_row(load(run, options.device)))]
    return {"data_sha256": config.data_sha256, "same_data": not options.data, "rows": rows}


def show(result: Mapping[str, Any], console: Console) -> None:
    console.print(f"surprise {result['rows'][0]['surprise']:.2f} bits")
