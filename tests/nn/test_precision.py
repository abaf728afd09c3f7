"""Dtypes, autocast, compilation, differentiating twice."""

import copy
import itertools
from typing import Any

import pytest
import torch

import normrnn
from tests.helpers import CELLS, NORMS, build, gradients, same, states
from tests.traced import check_pair

CASES = list(zip(itertools.cycle(CELLS), NORMS, strict=False))


def test_autocast_statistics_are_not_computed_in_bfloat16() -> None:
    """A mean of 1000 rows near 100 in bfloat16 would be off by a per cent or more."""
    layer: Any = normrnn.RNN(1, 1, momentum=1.0, norm="sequence")
    with torch.no_grad():
        layer.weight_ih_l0.fill_(1)
    x = (torch.rand(50, 40, 1) * 8 + 100).bfloat16().float()  # exact in bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x)
    state = layer.state_dict()
    torch.testing.assert_close(state["norm_l0.running_mean"], x.mean().view(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(state["norm_l0.running_var"], x.var().view(1), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("cell", "norm"), CASES)
class TestDtypes:
    def test_to_float64_and_back(self, cell: str, norm: str) -> None:
        layer = build(cell, norm, dtype=torch.float32).eval()
        x = torch.randn(5, 4, 3)
        wanted = layer(x)[0]
        assert wanted.dtype == torch.float32
        for double in (layer.to(torch.float64), layer.double()):
            out, final = double(x.double())
            assert out.dtype == torch.float64
            assert (final[0] if isinstance(final, tuple) else final).dtype == torch.float64
            assert {b.dtype for b in double.buffers()} <= {torch.float64, torch.int64}
            torch.testing.assert_close(out.float(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer.float()(x)[0], wanted, rtol=1e-5, atol=1e-5)

    def test_a_bfloat16_module(self, cell: str, norm: str) -> None:
        layer = build(cell, norm, dtype=torch.float32)
        low = copy.deepcopy(layer).to(torch.bfloat16)
        x, lengths = torch.randn(5, 6, 3), [5, 5, 4, 4, 4, 4]
        out, _ = low(x.bfloat16(), lengths=lengths)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        for grad in (p.grad for p in low.parameters()):
            assert grad.dtype == torch.bfloat16
            assert bool(grad.isfinite().all())
        assert (out.float() - layer(x, lengths=lengths)[0]).abs().mean() < 0.1
        assert all(bool(b.isfinite().all()) for b in low.buffers())


@pytest.mark.matrix(10)
@pytest.mark.parametrize("lengths", [None, [3, 2, 1]])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", CELLS)
def test_differentiating_twice(
    cell: str, norm: str, training: bool, lengths: list[int] | None
) -> None:
    """By the input, the initial state and every parameter, both directions, ragged too."""
    layer = build(cell, norm, bidirectional=True, eps=0.1, momentum=0.0).train(training)
    names = [name for name, _ in layer.named_parameters()]
    parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    x = torch.randn(3, 3, 3, dtype=torch.float64).requires_grad_()
    h, c = states(layer, 3)

    def f(x: torch.Tensor, h: torch.Tensor, *values: torch.Tensor) -> Any:
        given = dict(zip(names, values, strict=True))
        hx = (h, c.detach()) if layer.mode == "LSTM" else h
        return torch.func.functional_call(layer, given, (x, hx, lengths))[0]

    assert torch.autograd.gradgradcheck(f, (x, h, *parameters), fast_mode=True)


@pytest.mark.parametrize("norm", list(NORMS))
def test_a_penalty_on_gradients(norm: str) -> None:
    """Also for a loss that is linear in the output, whose gradient is a constant."""
    layer = build("lstm", norm, momentum=0.0)
    x = torch.randn(4, 3, 3, dtype=torch.float64).requires_grad_()

    def penalty(x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
        return grad.square().sum()

    assert torch.autograd.gradcheck(penalty, (x,), eps=1e-6, atol=1e-4, rtol=1e-3, fast_mode=True)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("norm", ["frame", "whiten", "layer"])
@pytest.mark.parametrize("training", [True, False])
def test_compile_with_a_graph_break(norm: str, training: bool) -> None:
    """Lengths in a list, NaN in the padding."""
    torch.compiler.reset()
    layer = build("lstm", norm, dtype=torch.float32).train(training)
    x, twin = torch.randn(5, 4, 3), copy.deepcopy(layer)
    x[3:, 1:] = float("nan")
    check_pair(layer, twin, torch.compile(layer, backend="eager"), (x, [5, 3, 3, 2]))


@pytest.mark.parametrize("norm", list(NORMS))
def test_inference_mode(norm: str) -> None:
    layer = build("gru", norm).eval()
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    with torch.inference_mode():
        out = layer(x, lengths=[5, 1, 2, 3])[0]
    torch.testing.assert_close(out, layer(x, lengths=[5, 1, 2, 3])[0], rtol=0, atol=0)


@pytest.mark.parametrize("norm", list(NORMS))
def test_only_some_parameters_train(norm: str) -> None:
    """Frozen weights get no gradient, and the others the same as before."""
    layer = build("lstm", norm, num_layers=2)
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    layer(x)[0].square().sum().backward()
    wanted = gradients(layer)
    layer.zero_grad()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("l1" in name and "hh" not in name)
    layer(x)[0].square().sum().backward()
    some = {name: g for name, g in wanted.items() if layer.get_parameter(name).requires_grad}
    same(gradients(layer), some, 1e-12)
