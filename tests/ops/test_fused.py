"""Calls by torch's fused kernels against the loop, and statistics from moments of x."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import normrnn
from normrnn.ops import Norm, Result, Steps, Weights, describe_call, recur
from normrnn.ops.call import CELLS
from normrnn.ops.fused import (
    can_run,
    input_statistics,
    moments_pay,
    single_buffer,
    without_tf32,
)

INPUT, HIDDEN = 3, 4
RAGGED, DENSE, SINGLE = Steps((5, 5, 5, 5, 3, 2)), Steps((4,) * 5), Steps((3, 2, 1))

NORMS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "sequence": {"kind": "input", "batch": True},
    "sequence, test": {"kind": "input", "slots": 1},
    "frame": {"kind": "input", "batch": True, "per_step": True},
    "frame, test": {"kind": "input", "per_step": True, "slots": 1},
    "frame, slots": {"kind": "input", "per_step": True, "slots": "T"},
    "hidden, test": {"kind": "step", "per_step": True, "slots": 1},
    "recurrent, test": {"kind": "recurrent", "per_step": True, "slots": 1},
}


def call(mode: str, D: int, steps: Steps, norm: str, *, is_ready: bool = False) -> Any:
    """A random call in float64, all of whose real tensors require gradients."""
    options = dict(NORMS[norm])
    G, slots = CELLS[mode].gates, options.pop("slots", None)
    C, T = G * HIDDEN, steps.time
    channels = D * (2 * C if options["kind"] == "recurrent" else C)
    if slots is None and options.get("per_step"):
        slots = 1  # for single rows

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).requires_grad_()

    weights = [
        Weights(
            None if is_ready else leaf(C, INPUT),
            leaf(C, HIDDEN),
            leaf(HIDDEN) if mode == "GRU" else None,
        )
        for _ in range(D)
    ]
    vectors: dict[str, Any] = {"bias": leaf(D * C)}
    if options["kind"] != "none":
        vectors["weight"] = leaf(D * C)
    if options["kind"] == "recurrent":
        vectors["gamma_hh"] = leaf(D * C)
    if slots is not None:
        rows = T if slots == "T" else 1
        var = (torch.rand(rows, channels, dtype=torch.float64) + 0.5).requires_grad_()
        vectors |= {"mean": leaf(rows, channels), "var": var}
    state = tuple(leaf(D, steps.batch, HIDDEN) for _ in range(CELLS[mode].states))
    x = leaf(steps.rows, D * C if is_ready else INPUT)
    reverse = (False, True)[:D]
    return describe_call(mode, reverse, x, weights, Norm(eps=1e-5, **options, **vectors), state)


def compare(spec: Any, steps: Steps, tensors: Any, *, again: bool = False) -> None:
    """Outputs, statistics and gradients by torch's kernels and by the loop; with ``again`` those
    of a function of the gradients too."""
    found: list[list[Tensor]] = []
    sources = [t for t in tensors if t is not None]
    for backend in ("torch", "loop"):
        with normrnn.backend(backend):  # type: ignore[arg-type]
            result: Result = recur(spec, steps, tensors)
        outputs = [result.rows, *result.state]
        torch.manual_seed(1)
        heads = [torch.randn_like(out) for out in outputs]
        grads = torch.autograd.grad(
            outputs, sources, heads, create_graph=again, materialize_grads=True
        )
        values = [*outputs, *(result.statistics or ()), *grads]
        if again:
            total = torch.stack([g.square().sum() for g in grads]).sum()
            values += torch.autograd.grad(total, sources, materialize_grads=True)
        found.append(values)
    assert len(found[0]) == len(found[1])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("steps", [RAGGED, DENSE, SINGLE], ids=["ragged", "dense", "single"])
@pytest.mark.parametrize("D", [1, 2])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mode", ["RNN_TANH", "RNN_RELU", "LSTM", "GRU"])
def test_one_call_of_a_layer(mode: str, norm: str, D: int, steps: Steps) -> None:
    spec, tensors = call(mode, D, steps, norm)
    compare(spec, steps, tensors)


@pytest.mark.parametrize("D", [1, 2])
@pytest.mark.parametrize("mode", ["RNN_TANH", "LSTM", "GRU"])
def test_ready_gate_inputs(mode: str, D: int) -> None:
    for steps, norm in itertools.product((RAGGED, DENSE), ("none", "frame")):
        spec, tensors = call(mode, D, steps, norm, is_ready=True)
        compare(spec, steps, tensors)


@pytest.mark.parametrize("norm", ["sequence", "frame"])
@pytest.mark.parametrize("mode", ["LSTM", "GRU"])
def test_second_derivatives(mode: str, norm: str) -> None:
    spec, tensors = call(mode, 2, RAGGED, norm)
    compare(spec, RAGGED, tensors, again=True)


def test_a_projection() -> None:
    shapes = (16, INPUT), (16, 2), (2, 4)
    weights = []
    for _ in range(2):
        w_ih, w_hh, w_hr = (torch.randn(*s, dtype=torch.float64).requires_grad_() for s in shapes)
        weights.append(Weights(w_ih, w_hh, w_hr=w_hr))
    norm = Norm("input", 1e-5, True, True)
    x = torch.randn(DENSE.rows, INPUT, dtype=torch.float64, requires_grad=True)
    spec, tensors = describe_call("LSTM", (False, True), x, weights, norm)
    compare(spec, DENSE, tensors)


def test_the_graph_is_kept_and_freed_as_with_torch() -> None:
    spec, tensors = call("LSTM", 1, DENSE, "frame")
    with normrnn.backend("torch"):
        rows = recur(spec, DENSE, tensors).rows
    (first,) = torch.autograd.grad(rows.sum(), [tensors.x], retain_graph=True)
    (second,) = torch.autograd.grad(rows.sum(), [tensors.x])
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(rows.sum(), [tensors.x])


def test_final_states_may_change_before_the_backward_pass() -> None:
    spec, tensors = call("LSTM", 1, DENSE, "frame")
    with normrnn.backend("torch"):
        result, other = (recur(spec, DENSE, tensors) for _ in range(2))
    for state in result.state:
        state.detach().zero_()
    grads = [torch.autograd.grad(r.rows.sum(), [tensors.x]) for r in (result, other)]
    assert torch.equal(*(g for (g,) in grads))


def test_gate_inputs_that_are_too_wide_for_an_identity() -> None:
    """The product with the identity grows with H²; changed weights have no such limit."""
    for H, is_able in ((256, True), (1024, False)):
        weights = [Weights(torch.zeros(4 * H, 1), torch.zeros(4 * H, H))] * 2
        for per_step in (True, False):
            steps = Steps((32,) * 2)
            norm = Norm("input", 1e-5, per_step, True)
            spec, tensors = describe_call("LSTM", (False, True), torch.zeros(64, 1), weights, norm)
            assert can_run(spec, steps, tensors) == (is_able or not per_step)


@pytest.mark.parametrize(("N", "I", "C"), [(50, 3, 8), (50, 30, 8)], ids=["moments", "projection"])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_statistics_in_float32(N: int, I: int, C: int, offset: float) -> None:  # noqa: E741
    """A large mean does not spoil the variance: moments are centred."""
    x, w = torch.randn(N, I) + offset, torch.randn(C, I)
    pre = x.double() @ w.double().t()
    mean, var = input_statistics(x, w)
    tol = 1e-4 if offset else 1e-5
    torch.testing.assert_close(mean.double(), pre.mean(0), rtol=tol, atol=tol * offset + tol)
    if moments_pay(N, I, C):  # the projection itself is rounded
        torch.testing.assert_close(
            var.double(), pre.var(0, correction=0), rtol=1e-4 if offset else 1e-5, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_half_precision_are_float32(dtype: torch.dtype) -> None:
    x, w = torch.randn(50, 3).to(dtype), torch.randn(8, 3).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean, var = input_statistics(x, w)
    assert mean.dtype == var.dtype == torch.float32
    exact = x.double() @ w.double().t()
    torch.testing.assert_close(var.double(), exact.var(0, correction=0), rtol=1e-5, atol=1e-5)


def test_single_buffer_has_matrices_first_and_keeps_gradients() -> None:
    shapes = ((8, 3), (8, 2), (8,), (8,)) * 2
    originals = [torch.randn(s, requires_grad=True) for s in shapes]
    flat = single_buffer(originals)
    for view, original in zip(flat, originals, strict=True):
        assert torch.equal(view, original)
    assert len({view.untyped_storage().data_ptr() for view in flat}) == 1
    in_memory = sorted(range(8), key=lambda k: flat[k].storage_offset())
    assert in_memory == [0, 1, 4, 5, 2, 3, 6, 7]
    ends = [flat[k].storage_offset() + flat[k].numel() for k in in_memory]
    starts = [flat[k].storage_offset() for k in in_memory]
    assert starts == [0, *ends[:-1]]
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
