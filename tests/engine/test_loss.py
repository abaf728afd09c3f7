"""The fused softmax cross entropy against torch's functions, and sums over batches."""

import json
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.engine import model as fused
from normrnn.engine.model import Sums, nats_and_errors
from normrnn.speech.config import FRAMES
from normrnn.text.config import WORDS

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
    with torch.no_grad():
        evaluated = nats_and_errors(*given)
    torch.testing.assert_close(evaluated, (wanted[0], wanted[1]))
    assert 0 < errors == wanted[1] < 17
    torch.testing.assert_close(nats, wanted[0])
    for actual, grad in zip(grads, wanted[2:], strict=True):
        torch.testing.assert_close(actual, grad / 3)


@pytest.mark.parametrize("sizes", [(17, 5, 11), (1, 1, 2), (70, 33, 500), (640, 200, 1000)])
@pytest.mark.parametrize("strided", [False, True])
def test_float32_against_float64(
    sizes: tuple[int, int, int], strided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another library than in float64; also rows that are not contiguous."""
    monkeypatch.setattr(fused, "CHUNK_ROWS", 300)
    *parameters, targets = case(*sizes)
    rows, weight, bias = (value.detach().float() for value in parameters)
    if strided:
        rows, weight = rows.T.contiguous().T, weight.repeat(1, 2)[:, : sizes[1]]
    given = rows, weight, bias = [value.requires_grad_() for value in (rows, weight, bias)]
    nats, errors = nats_and_errors(rows, weight, bias, targets)
    wanted = expected(rows, weight, bias, targets)
    assert errors == wanted[1]
    found = [nats, *torch.autograd.grad(nats, given)]
    with torch.no_grad():
        found.append(nats_and_errors(rows, weight, bias, targets)[0])
    for actual, value in zip(found, (wanted[0], *wanted[2:], wanted[0]), strict=True):
        scale = float(value.abs().max())
        torch.testing.assert_close(actual.double(), value, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("grad", [True, False])
def test_no_rows(grad: bool) -> None:
    """As a process has that gets none of a batch."""
    weight, bias = torch.ones(3, 2, requires_grad=True), torch.zeros(3, requires_grad=True)
    with torch.set_grad_enabled(grad):
        nats, errors = nats_and_errors(
            torch.ones(0, 2), weight, bias, torch.zeros(0, dtype=torch.long)
        )
    assert (nats, errors) == (0, 0)
    if grad:
        assert torch.autograd.grad(nats, weight)[0].eq(0).all()


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


def test_targets_and_errors_are_pooled_and_remainders_are_not_in_means() -> None:
    sums = Sums()
    for total, count, errors, is_full in (
        (20.0, 10, 3, True),
        (3.0, 6, 1, True),
        (1.0, 4, 0, False),
    ):
        sums.add(total, count, errors, FRAMES, grad_norm=count, is_full=is_full)
    assert sums.row(FRAMES) == {"loss": 24 / 20, "fer": 0.2, "count": 20}
    assert sums.grad_norm / sums.batches == 8
    assert Sums(**asdict(sums)) == sums


def test_a_diverging_batch_gives_a_finite_row() -> None:
    sums = Sums()
    sums.add(1e9, 10, None, WORDS)
    assert json.loads(json.dumps(sums.row(WORDS), allow_nan=False))["loss"] == pytest.approx(1e8)
