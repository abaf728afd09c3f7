"""A task of a user's own, complete: was the second bit set more often than the first?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normrnn
from normrnn.config.base import Config, Measure, bits
from normrnn.engine.task import Loss, Task


@dataclass(frozen=True, kw_only=True)
class MajorityConfig(Config):
    noun: ClassVar[str] = "a majority vote"
    task: ClassVar[str] = f"{__name__}:MajorityTask"
    hidden: int = 8

    @classmethod
    def measure(cls, settings: Mapping[str, Any]) -> Measure:
        long = f"surprise in bits, {settings['hidden']} cells"
        return Measure(name="surprise", long=long, convert=bits, columns={"surprise": bits})


def majority() -> MajorityConfig:
    """A majority vote, to show what a task is."""
    return MajorityConfig(recipe="majority", data="generated", epochs=2)


class MajorityNetwork(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.rnn = normrnn.GRU(2, config.hidden, norm=config.norm, batch_first=True)
        self.head = nn.Linear(config.hidden, 2)

    def loss(self, x: Tensor, y: Tensor) -> Loss:
        logits = self.head(self.rnn(x)[1][-1])
        return Loss(F.cross_entropy(logits, y, reduction="sum"))


class MajorityTask(Task):
    splits = ("valid", "test")
    per_step = False
    network = MajorityNetwork

    def __init__(self, config: MajorityConfig) -> None:
        x = (torch.rand(300, 9, 2, generator=torch.Generator().manual_seed(0)) > 0.5).float()
        y = (x.sum(1).diff(dim=1)[:, 0] > 0).long()
        super().__init__(config, sha256="of seed 0", source="coin tosses")
        parts = zip(x.split([200, 50, 50]), y.split([200, 50, 50]), strict=True)
        self.data = dict(zip(["train", "valid", "test"], parts, strict=True))
        self.lengths = {split: [9] * len(y) for split, (_, y) in self.data.items()}

    def read(self, split: str, indices: list[int]) -> tuple[Tensor, Tensor]:
        x, y = self.data[split]
        return x[indices].to(self.device), y[indices].to(self.device)
