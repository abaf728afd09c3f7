"""The fused softmax against torch's two functions."""

import pytest
import torch
import torch.nn.functional as F

from normrnn.models import loss as fused
from normrnn.models.loss import linear_cross_entropy


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


def test_without_gradients_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight, bias = _inputs()
    targets = torch.randint(0, 11, (17,))
    expected = linear_cross_entropy(rows, weight, bias, targets)
    monkeypatch.setattr(fused, "EVAL_ROWS", 4)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(rows, weight, bias, targets), expected)
