"""Statistics pooled over two real processes, against one process on the joined batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import normrnn
from normrnn.ops.sync import DEFAULT_POOL
from tests.helpers import build, check_against_reference
from tests.torchrun import started_ranks

RANKS = 2
LENGTHS = ([2, 6, 3], [4, 1])  # different counts of frames, sequences and time steps

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sequence": ("lstm", "sequence", {}),
    "sequence-stack": ("gru", "sequence", {"num_layers": 2, "bidirectional": True}),
    "frame": ("gru", "frame", {}),
    "frame-stack": ("lstm-all", "frame", {"num_layers": 2, "bidirectional": True}),
    "slots": ("tanh", "frame-slots", {"num_layers": 2, "bidirectional": True}),
    "frame with a shared start": ("gru", "frame", {"num_layers": 2, "bidirectional": True}),
    "slots with a shared start": ("lstm", "frame-slots", {}),
    "cumulative": ("lstm", "sequence", {"momentum": None, "affine": False}),
}


def layer_of(case: str, **more: Any) -> Any:
    cell, norm, options = CASES[case]
    torch.manual_seed(11)
    return build(cell, norm, **options, **more)


def batch_of(rank: int, case: str = "") -> tuple[Tensor, list[int]]:
    generator = torch.Generator().manual_seed(rank)
    lengths = LENGTHS[rank]
    x = torch.randn(max(lengths), len(lengths), 3, dtype=torch.float64, generator=generator)
    x = x * (1 + rank) + rank
    if case.endswith("shared start"):
        x[0] = 0.5
    return x, lengths


def cotangent(rank: int, output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(output.shape, dtype=torch.float64, generator=generator)


def step(case: str, rank: int, sync: bool) -> dict[str, Any]:
    """One training step of a rank: everything that has to agree."""
    layer = layer_of(case, sync=sync)
    x, lengths = batch_of(rank, case)
    x.requires_grad_()
    output, _ = layer(x, lengths=lengths)
    (output * cotangent(rank, output)).sum().backward()
    return {
        "output": output.detach(),
        "input": x.grad,
        "parameters": {name: p.grad for name, p in layer.named_parameters()},
        "buffers": dict(layer.named_buffers()),
    }


def worker(rank: int, folder: Path) -> None:
    """Run by the test below in a process of its own."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    found: dict[str, Any] = {case: step(case, rank, sync=True) for case in CASES}
    found["recalibrated"] = recalibrated(rank)
    found["lone"] = lone_rows(rank)
    found["twice"] = {case: twice(case, [rank], sync=True) for case in TWICE}
    found["one row each"] = one_row_each(rank)
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


TWICE = ["sequence", "frame"]


def twice(case: str, ranks: list[int], sync: bool) -> Tensor:
    """The derivative of W_h's squared derivative with respect to W_x: of equally long sequences,
    the loss and each square summed over ranks."""
    layer = layer_of(case, sync=sync)
    x = torch.cat([batch_of(rank)[0][:4, :2] for rank in ranks], 1)
    loss = layer(x)[0].square().sum()
    (first,) = torch.autograd.grad(loss, layer.weight_hh_l0, create_graph=True)
    if sync:  # the derivative of the joined loss, on every rank
        first = DEFAULT_POOL.sum(first, len(first))
        (second,) = torch.autograd.grad(first.square().sum() / RANKS, layer.weight_ih_l0)
        dist.all_reduce(second)
        return second
    return torch.autograd.grad(first.square().sum(), layer.weight_ih_l0)[0]


def recalibrated(rank: int) -> dict[str, Tensor]:
    layer = layer_of("sequence", sync=True)
    x, lengths = batch_of(rank)
    normrnn.recalibrate(layer, [{"input": x, "lengths": lengths}])
    return dict(layer.named_buffers())


def lone_rows(rank: int) -> dict[str, Any]:
    """One sequence per rank: together each step has two rows, until the shorter one ends."""
    layer = layer_of("frame", sync=True)
    x = batch_of(rank)[0][: 3 + rank, :1]
    output, _ = layer(x)
    return {"output": output.detach(), "buffers": dict(layer.named_buffers())}


def one_row_each(rank: int) -> int:
    layer = layer_of("sequence", sync=True)
    layer(batch_of(rank)[0][:1, :1])
    return int(layer.norm_l0.num_batches_tracked)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return started_ranks(Path(__file__), RANKS, tmp_path_factory.mktemp("ranks"))


def joined(case: str = "") -> tuple[Tensor, list[int]]:
    """Both ranks' sequences in one batch, padded with NaN."""
    batches = [batch_of(rank, case) for rank in range(RANKS)]
    T = max(x.shape[0] for x, _ in batches)
    lengths = [n for _, ns in batches for n in ns]
    x = torch.full((T, len(lengths), 3), float("nan"), dtype=torch.float64)
    first = 0
    for own, _ in batches:
        x[: own.shape[0], first : first + own.shape[1]] = own
        first += own.shape[1]
    return x.requires_grad_(), lengths


def close(actual: Tensor, expected: Tensor | None, what: str) -> None:
    assert expected is not None
    torch.testing.assert_close(
        actual, expected, rtol=1e-10, atol=1e-10, msg=lambda m: f"{what}: {m}"
    )


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(ranks: list[dict[str, Any]], case: str) -> None:
    """Outputs, input gradients, summed parameter gradients and buffers."""
    layer = layer_of(case)
    x, lengths = joined(case)
    output, _ = layer(x, lengths=lengths)
    weights, first = torch.zeros_like(output), 0
    for rank in range(RANKS):
        own = ranks[rank][case]["output"]
        T, B, _ = own.shape
        weights[:T, first : first + B] = cotangent(rank, own)
        first += B
    (output * weights).sum().backward()
    first = 0
    assert x.grad is not None
    for rank in range(RANKS):
        mine = ranks[rank][case]
        T, B, _ = mine["output"].shape
        close(mine["output"], output[:T, first : first + B], f"output of rank {rank}")
        close(mine["input"], x.grad[:T, first : first + B], f"input gradient of rank {rank}")
        first += B
        for name, buffer in layer.named_buffers():
            close(mine["buffers"][name], buffer, f"{name} of rank {rank}")
    for name, parameter in layer.named_parameters():
        total = sum(ranks[rank][case]["parameters"][name] for rank in range(RANKS))
        close(total, parameter.grad, f"gradient of {name}")  # type: ignore[arg-type]


@pytest.mark.parametrize("case", TWICE)
def test_it_can_be_differentiated_twice(ranks: list[dict[str, Any]], case: str) -> None:
    expected = twice(case, list(range(RANKS)), sync=False)
    for rank in range(RANKS):
        close(ranks[rank]["twice"][case], expected, f"of rank {rank}")


def test_recalibrate_pools_too(ranks: list[dict[str, Any]]) -> None:
    layer = layer_of("sequence")
    x, lengths = joined()
    normrnn.recalibrate(layer, [{"input": x.detach(), "lengths": lengths}])
    for rank in range(RANKS):
        for name, buffer in layer.named_buffers():
            close(ranks[rank]["recalibrated"][name], buffer, name)


def test_a_lone_row_is_lone_over_all_ranks(ranks: list[dict[str, Any]]) -> None:
    layer = layer_of("frame")
    x = torch.full((4, 2, 3), float("nan"), dtype=torch.float64)
    for rank in range(RANKS):
        x[: 3 + rank, rank] = batch_of(rank)[0][: 3 + rank, 0]
    output, _ = layer(x, lengths=[3, 4])
    for rank in range(RANKS):
        close(ranks[rank]["lone"]["output"][:, 0], output[: 3 + rank, rank], f"rank {rank}")
        for name, buffer in layer.named_buffers():
            close(ranks[rank]["lone"]["buffers"][name], buffer, name)


def test_one_row_on_each_rank_is_two_rows(ranks: list[dict[str, Any]]) -> None:
    """Training goes on: the buffers, which had seen 3 batches, have seen a fourth."""
    assert [ranks[rank]["one row each"] for rank in range(RANKS)] == [4, 4]


@pytest.mark.parametrize("case", CASES)
def test_without_a_process_group_it_is_local(case: str) -> None:
    assert not dist.is_initialized()
    layer = layer_of(case, sync=True)
    check_against_reference(layer, [3, 5, 3], "padded")
