"""Statistics pooled over two real processes, against one process on the joined batch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import normrnn
from normrnn.ops.sync import DEFAULT_POOL
from tests.helpers import build, check_against_reference, close
from tests.torchrun import started_ranks

RANKS = 2
LENGTHS = [2, 6, 3], [4, 1]  # different counts of frames, sequences and time steps
STACK = {"num_layers": 2, "bidirectional": True}
CASES: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "sequence": ("lstm", "sequence", {}, LENGTHS),
    "sequence-stack": ("gru", "sequence", STACK, LENGTHS),
    "frame": ("gru", "frame", {}, LENGTHS),
    "frame-stack": ("lstm-all", "frame", STACK, LENGTHS),
    "slots": ("tanh", "frame-slots", STACK, LENGTHS),
    "frame with a shared start": ("gru", "frame", STACK, LENGTHS),
    "slots with a shared start": ("lstm", "frame-slots", {}, LENGTHS),
    "cumulative": ("lstm", "sequence", {"momentum": None, "affine": False}, LENGTHS),
    # Each step has two rows, until the shorter sequence ends; and two rows altogether.
    "one sequence per rank": ("lstm", "frame", {}, ([3], [4])),
    "one row per rank": ("lstm", "sequence", {}, ([1], [1])),
}
TWICE = ["sequence", "frame"]


def layer_of(case: str, **more: Any) -> Any:
    cell, norm, options, _ = CASES[case]
    torch.manual_seed(11)
    return build(cell, norm, **options, **more)


def batch_of(case: str, rank: int) -> tuple[Tensor, list[int]]:
    generator = torch.Generator().manual_seed(rank)
    lengths = CASES[case][3][rank]
    x = torch.randn(max(lengths), len(lengths), 3, dtype=torch.float64, generator=generator)
    x = x * (1 + rank) + rank
    if case.endswith("shared start"):
        x[0] = 0.5
    return x, lengths


def joined(case: str) -> tuple[Tensor, list[int]]:
    """Both ranks' sequences in one batch, padded with NaN."""
    batches = [batch_of(case, rank) for rank in range(RANKS)]
    T = max(len(x) for x, _ in batches)
    padded = [
        torch.cat([x, torch.full((T - len(x), *x.shape[1:]), float("nan")).to(x)])
        for x, _ in batches
    ]
    return torch.cat(padded, 1), [n for _, lengths in batches for n in lengths]


def cotangent(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(10, 10, 10, dtype=torch.float64, generator=generator)


def step(case: str, rank: int) -> dict[str, Any]:
    """One training step of a rank: everything that has to agree."""
    layer = layer_of(case, sync=True)
    x, lengths = batch_of(case, rank)
    output, _ = layer(x.requires_grad_(), lengths=lengths)
    T, B, F = output.shape
    (output * cotangent(rank)[:T, :B, :F]).sum().backward()
    return {
        "output": output.detach(),
        "input": x.grad,
        "parameters": {name: p.grad for name, p in layer.named_parameters()},
        "buffers": dict(layer.named_buffers()),
    }


def twice(case: str, ranks: list[int], sync: bool) -> Tensor:
    """The derivative of W_h's squared derivative with respect to W_x: of equally long sequences,
    the loss and each square summed over ranks."""
    layer = layer_of(case, sync=sync)
    x = torch.cat([batch_of(case, rank)[0][:4, :2] for rank in ranks], 1)
    loss = layer(x)[0].square().sum()
    (first,) = torch.autograd.grad(loss, layer.weight_hh_l0, create_graph=True)
    if sync:  # the derivative of the joined loss, on every rank
        first = DEFAULT_POOL.sum(first, len(first))
        (second,) = torch.autograd.grad(first.square().sum() / RANKS, layer.weight_ih_l0)
        dist.all_reduce(second)
        return second
    return torch.autograd.grad(first.square().sum(), layer.weight_ih_l0)[0]


def recalibrated(x: Tensor, lengths: list[int], sync: bool) -> dict[str, Tensor]:
    layer = layer_of("sequence", sync=sync)
    normrnn.recalibrate(layer, [{"input": x, "lengths": lengths}])
    return dict(layer.named_buffers())


def worker(rank: int) -> dict[str, Any]:
    """Run by the fixture in a process of its own."""
    found: dict[str, Any] = {case: step(case, rank) for case in CASES}
    found["recalibrated"] = recalibrated(*batch_of("sequence", rank), sync=True)
    found["twice"] = {case: twice(case, [rank], sync=True) for case in TWICE}
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return started_ranks("tests.nn.test_sync", RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(ranks: list[dict[str, Any]], case: str) -> None:
    """Outputs, input gradients, summed parameter gradients and buffers."""
    layer, (x, lengths) = layer_of(case), joined(case)
    output, _ = layer(x.requires_grad_(), lengths=lengths)
    weights, places, first = torch.zeros_like(output), [], 0
    for rank in range(RANKS):
        T, B, F = ranks[rank][case]["output"].shape
        places.append((slice(T), slice(first, first + B)))
        weights[places[rank]] = cotangent(rank)[:T, :B, :F]
        first += B
    (output * weights).sum().backward()
    assert x.grad is not None
    for rank, place in enumerate(places):
        mine = ranks[rank][case]
        close(mine["output"], output[place], f"output of rank {rank}")
        close(mine["input"], x.grad[place], f"input gradient of rank {rank}")
        for name, buffer in layer.named_buffers():
            close(mine["buffers"][name], buffer, f"{name} of rank {rank}")
    for name, parameter in layer.named_parameters():
        total = sum(ranks[rank][case]["parameters"][name] for rank in range(RANKS))
        close(total, parameter.grad, f"gradient of {name}")  # type: ignore[arg-type]


def test_recalibrate_and_second_derivatives(ranks: list[dict[str, Any]]) -> None:
    expected = recalibrated(*joined("sequence"), sync=False)
    second = {case: twice(case, list(range(RANKS)), sync=False) for case in TWICE}
    for rank in range(RANKS):
        close_all = torch.testing.assert_close
        close_all(ranks[rank]["recalibrated"], expected, rtol=1e-10, atol=1e-10)
        close_all(ranks[rank]["twice"], second, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_without_a_process_group_it_is_local(case: str) -> None:
    assert not dist.is_initialized()
    check_against_reference(layer_of(case, sync=True), [3, 5, 3], "padded")
