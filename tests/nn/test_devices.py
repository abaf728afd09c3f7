"""Layers on another device than the CPU: the meta device stands in for all of them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import normrnn
from tests.helpers import NORMS

KINDS = {"LSTM": normrnn.LSTM, "GRU": normrnn.GRU, "RNN": normrnn.RNN}
SIZES = torch.tensor([12, 12, 6])
FUSED = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def built(norm: str, kind: Any = normrnn.LSTM, **options: Any) -> Any:
    options = {"bidirectional": norm == "sequence", **options}
    return kind(3, 4, device="meta", **options, **NORMS[norm])


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


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_forward_and_backward(norm: str, training: bool) -> None:
    for kind in KINDS.values():
        layer = built(norm, kind).train(training)
        check(lambda x, layer=layer: layer(x)[0], layer, batch())
        x = torch.empty(30, 3, device="meta", requires_grad=True)
        check(lambda x, layer=layer: layer(PackedSequence(x, SIZES))[0].data, layer, x)
        lengths = [3, 1, 2] * 4
        check(lambda x, layer=layer: layer(x, lengths=lengths)[0], layer, batch())  # noqa: B023


class Operations(TorchDispatchMode):
    """Counts operations; a call of a fused kernel is one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Autograd detaches outputs that it saves, which a device does not see.
        if not self.is_inside and func is not torch.ops.aten.detach.default:
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def fused_as_one(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        def counted(name: str, kernel: Any) -> Any:
            def run(*args: Any) -> Any:
                self.seen[name] += 1
                self.is_inside = True
                result = kernel(*args)
                self.is_inside = False
                return result

            return run

        with monkeypatch.context() as patched:
            for name in FUSED:
                patched.setattr(torch._VF, name, counted(name, getattr(torch._VF, name)))
            with self:
                yield


MOST = {
    **{"sequence": 0, "frame": 0, "frame-slots": 0, "whiten": 0, "none": 0},
    **{"layer": 24, "rms": 40, "hidden": 40, "hidden-shared": 40},
    **{"recurrent": 56, "recurrent-shared": 56},
}
"""Operations per time step of an LSTM's forward pass in training, both directions together."""
FUSED_AT_TEST_TIME = {"hidden-shared", "recurrent-shared"}


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


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_operations_of_a_dense_batch(
    norm: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few per time step, and none that waits for values: a CUDA graph can capture the pass."""
    totals, fused = [], []
    for time in (4, 14):
        layer, operations = built(norm, bidirectional=True).train(training), Operations()
        with Transfers() as transfers, operations.fused_as_one(monkeypatch):
            layer(batch(time))
        assert not transfers.seen
        totals.append(operations.seen.total())
        fused.append(sum(operations.seen[name] for name in FUSED))
    is_fused = MOST[norm] == 0 or (not training and norm in FUSED_AT_TEST_TIME)
    assert fused == [is_fused] * 2
    assert (totals[1] - totals[0]) / 10 <= (0 if is_fused else MOST[norm])
