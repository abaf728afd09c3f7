"""The fused softmax cross entropy against torch's functions, and in C against float64."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.engine import loss as fused
from normrnn.engine.loss import classify, nats_and_errors
from normrnn.ops.native.library import describe

Case = tuple[Tensor, Tensor, Tensor, Tensor]


def case(rows: int = 17, hidden: int = 5, classes: int = 11) -> Case:
    """Rows, weight and bias in float64, and targets."""
    torch.manual_seed(rows)
    shapes = ((rows, hidden), (classes, hidden), (classes,))
    x, w, b = (torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes)
    return x, w, b, torch.randint(0, classes, (rows,))


def expected(rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> list[Tensor]:
    """Nats, errors and the three gradients by torch's functions in float64."""
    given = [t.detach().double().requires_grad_() for t in (rows, weight, bias)]
    logits = F.linear(*given)
    nats = F.cross_entropy(logits, targets, reduction="sum")
    errors = (logits.argmax(1) != targets).sum()
    return [nats.detach(), errors, *torch.autograd.grad(nats, given)]


@pytest.mark.parametrize("chunk", [4, 2048])
def test_values_and_gradients_are_those_of_torch(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = case()
    monkeypatch.setattr(fused, "CHUNK_ROWS", chunk)
    nats, errors = nats_and_errors(*given)
    grads = torch.autograd.grad(nats / 3, given[:3])
    wanted = expected(*given)
    assert 0 < errors == wanted[1] < 17
    torch.testing.assert_close(nats, wanted[0])
    for actual, grad in zip(grads, wanted[2:], strict=True):
        torch.testing.assert_close(actual, grad / 3)


@pytest.mark.parametrize("classes", [5, 40])
def test_few_logits_are_in_memory_at_once_in_evaluation(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = case(23, 4, classes)
    sizes: list[int] = []

    def linear(*arguments: Tensor) -> Tensor:
        sizes.append(F.linear(*arguments).numel())
        return F.linear(*arguments)

    wanted = expected(*given)
    monkeypatch.setattr(fused, "LOGITS", 100)
    monkeypatch.setattr(fused, "F", SimpleNamespace(linear=linear, cross_entropy=F.cross_entropy))
    with torch.no_grad():
        nats, errors = nats_and_errors(*given)
    torch.testing.assert_close(nats, wanted[0])
    assert errors == wanted[1]
    assert max(sizes) <= 100


def test_differentiating_twice() -> None:
    """Also where the softmax's weight is part of what it is given, as a tied embedding is."""
    *given, targets = case(6, 2, 4)

    def tied(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return nats_and_errors(rows * weight.sum(), weight, bias, targets)[0]

    assert torch.autograd.gradcheck(tied, given)
    assert torch.autograd.gradgradcheck(tied, given)


@pytest.mark.parametrize("grad", [True, False])
def test_autocast(grad: bool) -> None:
    """Rows in low precision, weights in float32: nats in float32."""
    *given, targets = case()
    rows, weight, bias = (value.detach().float().requires_grad_() for value in given)
    low = rows.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(grad):
        nats, errors = nats_and_errors(low, weight, bias, targets)
    assert nats.dtype == torch.float32
    torch.testing.assert_close(
        nats.double(), expected(low, weight, bias, targets)[0], rtol=1e-5, atol=0
    )
    assert 0 < errors.item() < 17
    if grad:
        nats.backward()
        assert weight.grad is not None
        assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_logits_and_nan(dtype: torch.dtype) -> None:
    weight = torch.tensor([[1.0], [0.0], [-1.0]], dtype=dtype)
    rows = torch.full((2, 1), 2e4, dtype=dtype, requires_grad=True)
    bias, targets = torch.zeros(3, dtype=dtype), torch.tensor([2, 0])
    nats, _ = nats_and_errors(rows, weight, bias, targets)
    assert nats == 4e4  # of the first row: 2e4 − (−2e4)
    (grad,) = torch.autograd.grad(nats, rows)
    assert grad.isfinite().all()
    wild = torch.tensor([[float("nan")], [1.0]], dtype=dtype, requires_grad=True)
    nats, _ = nats_and_errors(wild, weight, bias, targets)
    (grad,) = torch.autograd.grad(nats, wild)
    assert nats.isnan()
    assert grad.isnan().tolist() == [[True], [False]]


@pytest.mark.skipif(describe()["kernels"] == "torch", reason="no kernels here")
class TestKernel:
    @pytest.mark.parametrize("threads", [1, 2, 3])
    @pytest.mark.parametrize(
        "sizes", [(1, 1, 1), (2, 4, 16), (3, 5, 33), (40, 33, 50), (210, 20, 1003)]
    )
    def test_numbers_and_gradients(self, sizes: tuple[int, int, int], threads: int) -> None:
        *given, targets = case(*sizes)
        rows, weight, bias = (value.detach().float() for value in given)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            result = classify(rows, weight, bias, targets)
        finally:
            torch.set_num_threads(before)
        assert result is not None
        for actual, wanted in zip(result, expected(rows, weight, bias, targets), strict=True):
            size = max(wanted.abs().max().item(), 1.0)
            torch.testing.assert_close(actual.double(), wanted.double(), rtol=0, atol=1e-5 * size)

    def test_of_equal_classes_the_first_is_the_most_probable(self) -> None:
        targets = torch.tensor([0, 1, 4])
        result = classify(torch.zeros(3, 2), torch.ones(5, 2), torch.zeros(5), targets)
        assert result is not None
        assert result.errors == 2

    def test_arguments_that_it_refuses(self) -> None:
        rows, weight, bias = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)
        right = torch.tensor([0, 3])
        for wrong in (
            (rows.double(), weight, bias, right),
            (rows, weight, bias, right.int()),
            (rows, weight, bias, right + 1),
            (rows, weight, bias, right - 1),
            (rows, weight[:, :2], bias, right),
            (rows, weight, bias[:3], right),
            (rows[:0], weight, bias, right[:0]),
            (rows.to("meta"), weight, bias, right),
        ):
            assert classify(*wrong) is None
        transposed = classify(rows, weight.t().contiguous().t(), bias, right)
        result = classify(rows, weight, bias, right)
        assert transposed is not None
        assert result is not None
        torch.testing.assert_close(transposed.d_weight, result.d_weight)
