"""The fused softmax against torch's two functions."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.engine import loss as fused
from normrnn.engine.loss import linear_cross_entropy, nats_and_errors


def _inputs() -> list[torch.Tensor]:
    torch.manual_seed(1)
    shapes = ((17, 5), (11, 5), (11,))
    return [torch.randn(s, dtype=torch.float64).mul(4).requires_grad_() for s in shapes]


def test_value_and_all_gradients_are_those_of_the_unfused() -> None:
    rows, weight, bias = _inputs()
    targets = torch.randint(0, 11, (17,))
    expected = F.cross_entropy(F.linear(rows, weight, bias), targets, reduction="sum")
    wanted = torch.autograd.grad(expected / 3, (rows, weight, bias))
    actual = linear_cross_entropy(rows, weight, bias, targets)
    got = torch.autograd.grad(actual / 3, (rows, weight, bias))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(got, wanted)


def test_huge_logits_stay_finite() -> None:
    rows = torch.full((2, 1), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    nats = linear_cross_entropy(rows, weight, torch.zeros(2), torch.tensor([0, 1]))
    nats.backward()
    assert nats.item() == pytest.approx(2e4)
    assert rows.grad is not None
    assert rows.grad.isfinite().all()


def test_in_pieces_with_gradients_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight, bias = _inputs()
    targets = torch.randint(0, 11, (17,))
    logits = F.linear(rows, weight, bias)
    expected = F.cross_entropy(logits, targets, reduction="sum")
    wrong = int((logits.argmax(1) != targets).sum())
    assert 0 < wrong < 17
    wanted = torch.autograd.grad(expected, (rows, weight, bias))
    monkeypatch.setattr(fused, "CHUNK_ROWS", 4)
    nats, errors = nats_and_errors(rows, weight, bias, targets)
    assert errors.item() == wrong
    torch.testing.assert_close(nats, expected)
    torch.testing.assert_close(torch.autograd.grad(nats, (rows, weight, bias)), wanted)
    with torch.no_grad():
        assert nats_and_errors(rows, weight, bias, targets)[1].item() == wrong


def test_without_gradients_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight, bias = _inputs()
    targets = torch.randint(0, 11, (17,))
    expected = linear_cross_entropy(rows, weight, bias, targets)
    monkeypatch.setattr(fused, "CHUNK_ROWS", 4)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(rows, weight, bias, targets), expected)


def test_differentiating_twice() -> None:
    """Also where the softmax's weight is part of what it is given, as a tied embedding is."""
    rows, weight, bias = _inputs()
    targets = torch.randint(0, 11, (17,))

    def tied(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(rows * weight.sum(), weight, bias, targets)

    small = [value.detach().div(10).requires_grad_() for value in (rows, weight, bias)]
    assert torch.autograd.gradcheck(tied, small)
    assert torch.autograd.gradgradcheck(tied, small)


@pytest.mark.parametrize("grad", [True, False])
def test_autocast(grad: bool) -> None:
    """Rows in low precision, weights in float32: nats in float32."""
    rows, weight, bias = (value.detach().float().requires_grad_() for value in _inputs())
    targets = torch.randint(0, 11, (17,))
    low = rows.bfloat16()
    expected = F.cross_entropy(F.linear(low.float(), weight, bias), targets, reduction="sum")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(grad):
        nats, errors = nats_and_errors(low, weight, bias, targets)
    assert nats.dtype == torch.float32
    torch.testing.assert_close(nats, expected)
    assert 0 < errors.item() < 17
    if grad:
        nats.backward()
        assert weight.grad is not None
        assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("classes", [5, 40])
def test_nats_of_each_and_together(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few logits may be held at once."""
    torch.manual_seed(0)
    rows, weight, bias = torch.randn(23, 4), torch.randn(classes, 4), torch.randn(classes)
    targets = torch.randint(classes, (23,))
    expected = F.cross_entropy(F.linear(rows, weight, bias), targets, reduction="none")
    held: list[int] = []

    def linear(*given: Tensor) -> Tensor:
        held.append(F.linear(*given).numel())
        return F.linear(*given)

    monkeypatch.setattr(fused, "LOGITS", 100)
    monkeypatch.setattr(fused, "F", SimpleNamespace(linear=linear, cross_entropy=F.cross_entropy))
    torch.testing.assert_close(fused.nats_of_each(rows, weight, bias, targets), expected)
    with torch.no_grad():
        nats, errors = nats_and_errors(rows, weight, bias, targets)
    torch.testing.assert_close(nats, expected.sum())
    wrong = F.linear(rows, weight, bias).argmax(1) != targets
    assert errors.item() == wrong.sum().item()
    assert max(held) <= 100
