"""Calls by torch's fused kernels against the loop, and statistics from moments of x."""

from typing import Any

import pytest
import torch

import normrnn
from normrnn.ops import Norm, Result, Steps, Weights, describe_call, recur
from normrnn.ops.fused import can_run, input_statistics, moments_pay, single_buffer, without_tf32
from normrnn.ops.loop import loop
from tests.kernel_cases import Case, as_type, computed, problem, second_derivatives, tensors_of

NORMS = ["plain", "sequence", "sequence fixed", "frame", "frame slots", "frame fixed"]
NORMS += ["frame fixed slots", "step fixed", "recurrent fixed"]
DENSE = Steps((4,) * 5)


def by_torch(spec: Any, steps: Steps, tensors: Any) -> Result:
    with normrnn.backend("torch"):
        return recur(spec, steps, tensors)


def in_float64(mode: str, norm: str, sizes: tuple[int, ...], **options: Any) -> tuple[Case, Any]:
    case = Case(mode, norm, sizes, (False, True), **{"hidden": 4, **options})
    return case, as_type(tensors_of(case), torch.float64)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mode", ["RNN_TANH", "RNN_RELU", "LSTM", "GRU"])
def test_one_call_of_a_layer(mode: str, norm: str) -> None:
    """Ragged, dense, and with single rows; also of ready gate inputs."""
    for sizes in ((5, 5, 5, 5, 3, 2), (4,) * 5, (3, 2, 1)):
        for inputs in (3, 0) if norm in ("plain", "frame") else (3,):
            case, tensors = in_float64(mode, norm, sizes, inputs=inputs)
            if "mean" in tensors:  # of which there are gradients too
                tensors["mean"].requires_grad_()
                tensors["var"].requires_grad_()
            close(computed(case, tensors, by_torch), computed(case, tensors, loop))


@pytest.mark.parametrize("norm", ["sequence", "frame"])
@pytest.mark.parametrize("mode", ["LSTM", "GRU"])
def test_second_derivatives(mode: str, norm: str) -> None:
    case, tensors = in_float64(mode, norm, (5, 5, 3, 2))
    close(*(second_derivatives(case, tensors, compute) for compute in (by_torch, loop)))


def call(mode: str, norm: str) -> tuple[Any, Any]:
    case, tensors = in_float64(mode, norm, DENSE.sizes)
    spec, _, own = problem(case, tensors)
    return spec, own


def test_the_graph_is_kept_and_freed_as_with_torch() -> None:
    """Final states may change before the backward pass."""
    spec, tensors = call("LSTM", "frame")
    with normrnn.backend("torch"):
        result = recur(spec, DENSE, tensors)
    (first,) = torch.autograd.grad(result.rows.sum(), [tensors.x], retain_graph=True)
    for state in result.state:
        state.detach().zero_()
    (second,) = torch.autograd.grad(result.rows.sum(), [tensors.x])
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(result.rows.sum(), [tensors.x])


def test_gate_inputs_that_are_too_wide_for_an_identity() -> None:
    """The product with the identity grows with H²; changed weights have no such limit."""
    for H, is_able in ((256, True), (1024, False)):
        weights = [Weights(torch.zeros(4 * H, 1), torch.zeros(4 * H, H))] * 2
        for per_step in (True, False):
            steps = Steps((32,) * 2)
            norm = Norm("input", 1e-5, per_step, True)
            spec, tensors = describe_call("LSTM", (False, True), torch.zeros(64, 1), weights, norm)
            assert can_run(spec, steps, tensors) == (is_able or not per_step)


@pytest.mark.parametrize(
    ("offset", "dtype"),
    [(0.0, torch.float32), (1e3, torch.float32), (0.0, torch.float16), (0.0, torch.bfloat16)],
)
@pytest.mark.parametrize("features", [3, 30], ids=["moments", "projection"])
def test_statistics_are_float32(features: int, offset: float, dtype: torch.dtype) -> None:
    """A large mean does not spoil the variance: moments are centred."""
    x, w = (torch.randn(50, features) + offset).to(dtype), torch.randn(8, features).to(dtype)
    pre = x.double() @ w.double().t()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
        mean, var = input_statistics(x, w)
    assert mean.dtype == var.dtype == torch.float32
    is_exact = moments_pay(50, features, 8)  # else the projection itself is rounded
    tol = 1e-4 if offset else 1e-5
    if is_exact or dtype == torch.float32:
        torch.testing.assert_close(mean.double(), pre.mean(0), rtol=tol, atol=tol * offset + tol)
    if is_exact:
        torch.testing.assert_close(var.double(), pre.var(0, correction=0), rtol=tol, atol=1e-5)


def test_single_buffer_has_matrices_first_and_keeps_gradients() -> None:
    shapes = ((8, 3), (8, 2), (8,), (8,)) * 2
    originals = [torch.randn(s, requires_grad=True) for s in shapes]
    flat = single_buffer(originals)
    torch.testing.assert_close(flat, originals, rtol=0, atol=0)
    assert len({view.untyped_storage().data_ptr() for view in flat}) == 1
    first = 0
    for k in (0, 1, 4, 5, 2, 3, 6, 7):
        assert flat[k].storage_offset() == first
        first += flat[k].numel()
    total = torch.stack([view.sum() for view in flat]).sum()
    for grad in torch.autograd.grad(total, originals):
        assert torch.equal(grad, torch.ones_like(grad))


def test_tf32_setting_is_restored() -> None:
    def precision() -> tuple[Any, ...]:
        settings: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn.rnn
        return tuple(setting.fp32_precision for setting in settings)

    before = precision()
    with without_tf32(torch.device("cuda")):
        assert precision() == ("ieee", "ieee")
    assert precision() == before
    with without_tf32(torch.device("cpu")):
        assert precision() == before
