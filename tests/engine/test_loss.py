"""The fused softmax against torch's two functions."""

import pytest
import torch
import torch.nn.functional as F

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
