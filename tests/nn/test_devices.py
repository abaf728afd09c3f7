"""Layers on another device than the CPU: the meta device stands in for all of them."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

import normrnn
from tests.helpers import NORMS

ONE_EACH = ["sequence", "frame", "hidden-shared", "layer", "recurrent-shared", "whiten", "none"]

SIZES = torch.tensor([12, 12, 6])


def built(norm: str, kind: Any = normrnn.LSTM) -> Any:
    return kind(3, 4, bidirectional=norm == "sequence", device="meta", **NORMS[norm])


def batch(time: int = 3) -> Tensor:
    return torch.empty(time, 12, 3, device="meta", requires_grad=True)


def check(model: Any, parameters: nn.Module, x: Tensor) -> None:
    """Forward and backward, with every gradient."""
    output = model(x)
    assert output.device.type == "meta"
    output.sum().backward()
    for tensor in (x, *parameters.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.device.type == "meta"
        tensor.grad = None


@pytest.mark.matrix(2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_forward_and_backward(norm: str, training: bool) -> None:
    for kind in (normrnn.LSTM, normrnn.GRU, normrnn.RNN):
        layer = built(norm, kind).train(training)
        check(lambda x, layer=layer: layer(x)[0], layer, batch())
        x = torch.empty(30, 3, device="meta", requires_grad=True)
        check(lambda x, layer=layer: layer(PackedSequence(x, SIZES))[0].data, layer, x)
        lengths = [3, 1, 2] * 4
        check(lambda x, layer=layer: layer(x, lengths=lengths)[0], layer, batch())  # noqa: B023


class Sum(nn.Module):
    """Layers of all norms on the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(built(norm) for norm in ONE_EACH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x)[0].sum() for layer in self.layers])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's
@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_norm_compiled(training: bool) -> None:
    torch._dynamo.reset()
    model = Sum().train(training)
    check(torch.compile(model, fullgraph=True, backend="aot_eager"), model, batch(2))


TRANSFERS = {"tensor", "as_tensor", "item", "tolist", "cpu", "equal", "nonzero"}
TRANSFERS |= {"__bool__", "__int__", "__float__", "__index__"}


class Transfers(TorchFunctionMode):
    """Counts what a device has to wait for: values read by the host, or copied from it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in TRANSFERS or (name == "to" and args[0].device != result.device):
            self.seen[name] += 1
        return result


@pytest.mark.parametrize("norm", NORMS)
def test_no_transfer_at_every_time_step(norm: str) -> None:
    for training in (True, False):
        layer, counts = built(norm).train(training), []
        for time in (2, 5):
            with Transfers() as transfers:
                layer(batch(time))
            counts.append(transfers.seen)
        assert counts[0] == counts[1]
