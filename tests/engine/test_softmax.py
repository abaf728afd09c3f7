"""Softmax cross entropy in C against torch's own in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.engine.softmax import Classified, classify
from normrnn.ops.native.library import describe

pytestmark = pytest.mark.skipif(describe()["kernels"] == "torch", reason="no kernels here")


def in_float64(rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> list[Tensor]:
    given = [t.double().requires_grad_() for t in (rows, weight, bias)]
    logits = F.linear(*given)
    nats = F.cross_entropy(logits, targets, reduction="sum")
    errors = (logits.argmax(1) != targets).sum()
    return [nats.detach(), errors, *torch.autograd.grad(nats, given)]


def found(*given: Tensor) -> Classified:
    result = classify(*given)
    assert result is not None
    return result


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("N", "H", "C"), [(1, 1, 1), (2, 4, 16), (3, 5, 33), (40, 33, 50), (210, 20, 1003)]
)
def test_numbers_and_gradients(N: int, H: int, C: int, threads: int) -> None:
    torch.manual_seed(N)
    given = torch.randn(N, H), torch.randn(C, H), torch.randn(C), torch.randint(C, (N,))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = found(*given)
    finally:
        torch.set_num_threads(before)
    assert result.errors == in_float64(*given)[1]
    for actual, wanted in zip(result, in_float64(*given), strict=True):
        size = max(wanted.abs().max().item(), 1.0)
        torch.testing.assert_close(actual.double(), wanted.double(), rtol=0, atol=1e-5 * size)


def test_of_equal_classes_the_first_is_the_most_probable() -> None:
    result = found(torch.zeros(3, 2), torch.ones(5, 2), torch.zeros(5), torch.tensor([0, 1, 4]))
    assert result.errors == 2
    torch.testing.assert_close(result.nats.item(), 3 * torch.tensor(5.0).log().item())


def test_huge_logits_and_nan() -> None:
    weight, right = torch.tensor([[1.0], [0.0], [-1.0]]), torch.tensor([2, 0])
    result = found(torch.full((2, 1), 2e4), weight, torch.zeros(3), right)
    assert result.nats == 4e4  # of the first row: 2e4 − (−2e4)
    assert result.d_weight.isfinite().all()
    nan = found(torch.tensor([[float("nan")], [1.0]]), weight, torch.zeros(3), right)
    assert nan.nats.isnan()
    assert nan.d_rows[0].isnan().all()
    assert nan.d_rows[1].isfinite().all()


def test_what_c_cannot_take() -> None:
    rows, weight, bias, right = (
        torch.ones(2, 3),
        torch.ones(4, 3),
        torch.ones(4),
        torch.tensor([0, 3]),
    )
    assert classify(rows.double(), weight, bias, right) is None
    assert classify(rows, weight, bias, right.int()) is None
    assert classify(rows, weight, bias, right + 1) is None
    assert classify(rows, weight, bias, right - 1) is None
    assert classify(rows, weight[:, :2], bias, right) is None
    assert classify(rows, weight, bias[:3], right) is None
    assert classify(rows[:0], weight, bias, right[:0]) is None
    assert classify(rows.to("meta"), weight, bias, right) is None
    turned = found(rows, weight.t().contiguous().t(), bias, right)
    torch.testing.assert_close(turned.d_weight, found(rows, weight, bias, right).d_weight)
