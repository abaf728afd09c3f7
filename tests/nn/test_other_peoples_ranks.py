"""`sync=True` in other people's distributed code: DDP, FSDP, `Join`, process groups of their own.

Three real processes; every case is compared with one process on the joined batch.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import normrnn
from tests.helpers import reloaded
from tests.torchrun import started_ranks

RANKS = 3
BATCHES = 2


class Net(nn.Module):
    """Two layers, a product, and the mean of its squares: a loss."""

    def __init__(self, norm: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.lstm: Any = normrnn.LSTM(4, 6, 2, norm=norm, **options)
        self.decoder = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.lstm(x)[0]).square().sum(2).mean()


def batch(rank: int, number: int) -> Tensor:
    """As many sequences for everybody: DDP averages gradients over ranks."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(5, 2, 4, generator=generator) * (1 + rank) + rank


def train(model: Any, shared: Callable[[int], Tensor], clip: Any = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(BATCHES):
        optimizer.zero_grad()
        model(shared(number)).backward()
        if clip is not None:
            clip()
        optimizer.step()


def ddp(rank: int, norm: Any) -> dict[str, Tensor]:
    model = Net(norm, sync=True)
    train(DistributedDataParallel(model), lambda number: batch(rank, number))
    return model.state_dict()


def sharded(rank: int, norm: Any) -> dict[str, Tensor]:
    """FSDP2: parameters are DTensors between the calls."""
    model = Net(norm, sync=True)
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    fully_shard(model.lstm, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, lambda number: batch(rank, number))
    whole = model.state_dict()
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in whole.items()}


def ended_early(rank: int) -> str:
    """The same, where the first that runs out ends it for all."""
    model = DistributedDataParallel(Net("sequence", sync=True))
    seen = 0
    try:
        with Join([model], throw_on_early_termination=True):
            for number in range(BATCHES - (rank == 0)):
                model(batch(rank, number)).backward()
                seen += 1
    except RuntimeError as error:
        return f"{seen} {error}"
    return ""


def unequal(rank: int) -> int:
    """Unequal numbers of batches: fine while each rank keeps statistics of its own."""
    model = DistributedDataParallel(Net("sequence"))
    with Join([model]):
        for number in range(BATCHES + rank):
            model(batch(rank, number)).backward()
    return int(model.module.lstm.norm_l0.num_batches_tracked)


def group_layer(**options: Any) -> Any:
    torch.manual_seed(6)
    return normrnn.GRU(4, 3, norm="frame", **options)


def grouped(rank: int) -> dict[str, Any]:
    """Ranks 0 and 1 pool, 2 is a group of its own."""
    pair, lone = dist.new_group([0, 1]), dist.new_group([2])
    own = lone if rank == 2 else pair
    other = pair if rank == 2 else lone
    layer = group_layer(sync=True, process_group=own)
    assert not any("group" in name for name in layer.state_dict())
    layers = {"layer": layer, "copied": copy.deepcopy(layer), "loaded": reloaded(layer)}
    found: dict[str, Any] = {}
    for name, one in layers.items():
        one(batch(rank, 0))
        found[name] = one.norm_l0.running_mean.clone()
    try:
        normrnn.LSTM(4, 3, sync=True, process_group=other, norm="sequence")
    except ValueError as error:
        found["refused"] = str(error)
    return found


def worker(rank: int) -> dict[Any, Any]:
    """Run by the fixture in a process of its own."""
    found: dict[Any, Any] = {"grouped": grouped(rank)}
    for norm in ("sequence", "frame"):
        found |= {("ddp", norm): ddp(rank, norm), ("sharded", norm): sharded(rank, norm)}
    return found | {"unequal": unequal(rank), "early": ended_early(rank)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return started_ranks(
        "tests.nn.test_other_peoples_ranks", RANKS, tmp_path_factory.mktemp("ranks")
    )


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("norm", ["sequence", "frame"])
@pytest.mark.parametrize("how", ["ddp", "sharded"])
def test_parameters_and_statistics_are_those_of_one_process(
    ranks: list[dict[Any, Any]], how: str, norm: Any
) -> None:
    model = Net(norm)
    train(model, lambda number: torch.cat([batch(rank, number) for rank in range(RANKS)], 1))
    for rank in ranks:
        torch.testing.assert_close(rank[how, norm], dict(model.state_dict()), rtol=1e-4, atol=1e-5)


def test_join_that_ends_with_the_first_works(ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        assert rank["early"].startswith("1 ")
        assert "exhausted" in rank["early"]


def test_join_without_sync(ranks: list[dict[Any, Any]]) -> None:
    """In the end all have the model of the rank with the most batches."""
    assert [rank["unequal"] for rank in ranks] == [BATCHES + RANKS - 1] * RANKS


def test_a_process_group_pools_among_its_own(ranks: list[dict[Any, Any]]) -> None:
    def mean(*members: int) -> Tensor:
        layer = group_layer()
        layer(torch.cat([batch(rank, 0) for rank in members], 1))
        return layer.norm_l0.running_mean

    for rank, members in ((0, (0, 1)), (1, (0, 1)), (2, (2,))):
        found = ranks[rank]["grouped"]
        torch.testing.assert_close(found["layer"], mean(*members))
        torch.testing.assert_close(found["copied"], mean(*members))
        torch.testing.assert_close(found["loaded"], mean(0, 1, 2))
        assert "not in the process_group" in found["refused"]
