"""The recurrence as a function: numerical gradients of both orders, what it refuses."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from normrnn import ops
from normrnn.ops import Norm, Result, Steps, Weights, call, describe_call
from normrnn.ops import loop as loops
from normrnn.ops.native import kernel
from tests.kernel_cases import one_direction

H = 2
SIZES = [(3, 3, 3), (3, 2, 2, 1), (1, 1), (2,)]
MODES = {"RNN_TANH": 1, "RNN_RELU": 1, "LSTM": 4, "GRU": 3}


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


@pytest.mark.matrix(4)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("vectors", ["", "bias_hn", "o", "ifo", "if"])
@pytest.mark.parametrize("mode", MODES)
def test_numerical_gradients(
    mode: str, vectors: str, sizes: tuple[int, ...], reverse: bool
) -> None:
    if vectors and mode != ("GRU" if vectors == "bias_hn" else "LSTM"):
        pytest.skip("vectors of another cell")
    steps, parts = Steps(sizes), 2 if mode == "LSTM" else 1
    names = [vectors] if vectors == "bias_hn" else [f"peephole_{gate}" for gate in vectors]

    def f(gates: Tensor, w: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        own = dict(zip(names, rest[parts:], strict=True))
        return one_direction(mode, gates, w, steps, *rest[:parts], reverse=reverse, **own)

    given = [leaf(steps.rows, MODES[mode] * H), leaf(MODES[mode] * H, H)]
    given += [leaf(steps.batch, H) for _ in range(parts)] + [leaf(H) for _ in names]
    assert gradcheck(f, given)
    assert gradgradcheck(f, given, fast_mode=True)


def norm_of(kind: str, vectors: dict[str, Any], batch: bool) -> Norm:
    """A normalisation of two directions; single rows and test time have given statistics."""
    C = len(vectors["weight"])
    mean, var = torch.linspace(-1, 1, C).double()[None], torch.linspace(0.5, 2, C).double()[None]
    if kind == "none":
        return Norm(bias=vectors["bias"])
    if kind == "row":
        return Norm("row", 0.1, cell="weight_c" in vectors, **vectors)
    per_step = kind in ("frame", "step")
    kind = "step" if kind == "step" else "input"
    return Norm(kind, 0.1, per_step, batch, mean=mean, var=var, **vectors)


def recur(mode: str, reverse: tuple[bool, ...], steps: Steps, *args: Any) -> Result:
    spec, tensors = describe_call(mode, reverse, *args)
    return ops.recur(spec, steps, tensors)


@pytest.mark.matrix(5)
@pytest.mark.parametrize("kind", ["none", "sequence", "frame", "step", "row"])
@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("mode", ["RNN_TANH", "LSTM", "GRU"])
def test_every_norm_differentiates_twice(mode: str, batch: bool, kind: str) -> None:
    """Ragged, both directions in one call, with a lone row at the end."""
    steps, C = Steps((3, 2, 1)), 2 * MODES[mode] * H
    names = ["weight", "bias"] + (["gamma_hh"] if kind == "row" else [])
    sizes = [C] * len(names)
    if kind == "row" and mode == "LSTM":
        names, sizes = [*names, "weight_c", "bias_c"], [*sizes, 2 * H, 2 * H]
    parts = 2 if mode == "LSTM" else 1

    def f(pre: Tensor, w: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        state, vectors = rest[:parts], dict(zip(names, rest[parts:], strict=True))
        weights, norm = [Weights(None, own) for own in w], norm_of(kind, vectors, batch)
        result = recur(mode, (False, True), steps, pre, weights, norm, state)
        return result.rows, *result.state

    given = [leaf(steps.rows, C), leaf(2, C // 2, H)]
    given += [leaf(2, steps.batch, H) for _ in range(parts)] + [leaf(n) for n in sizes]
    assert gradcheck(f, given)
    assert gradgradcheck(f, given, fast_mode=True)


@pytest.mark.parametrize("mode", MODES)
def test_directions_of_one_call_are_two_calls(mode: str) -> None:
    steps, C = Steps((3, 2, 1)), MODES[mode] * H
    pre, weights = leaf(steps.rows, 2 * C), [Weights(None, leaf(C, H)) for _ in range(2)]
    both = recur(mode, (False, True), steps, pre, weights, Norm())
    for d, reverse in enumerate((False, True)):
        own = pre[:, d * C : (d + 1) * C]
        one = recur(mode, (reverse,), steps, own, weights[d : d + 1], Norm())
        assert torch.equal(one.rows, both.rows[:, d * H : (d + 1) * H])
        for a, b in zip(one.state, both.state, strict=True):
            assert torch.equal(a[0], b[d])


def test_no_state_is_a_state_of_zeros() -> None:
    steps, gates, w = Steps((3, 2)), leaf(5, 4 * H), leaf(4 * H, H)
    zeros = torch.zeros(3, H, dtype=torch.float64)
    wanted = one_direction("LSTM", gates, w, steps, zeros, zeros)[0]
    assert torch.equal(one_direction("LSTM", gates, w, steps)[0], wanted)


def test_inputs_are_left_alone() -> None:
    steps, gates, w = Steps((3, 2)), leaf(5, 4 * H), leaf(4 * H, H)
    before = gates.detach().clone()
    one_direction("LSTM", gates, w, steps)[0].sum().backward()
    assert torch.equal(gates, before)


class TestRefused:
    steps = Steps((3, 2))

    def test_types_that_differ(self) -> None:
        """float32 gates with a float64 state once gave numbers from nowhere."""
        gates, w = torch.randn(5, 4 * H), torch.randn(4 * H, H)
        h0 = torch.zeros(3, H)
        with pytest.raises(ValueError, match=r"c0.*float32.*got torch.float64"):
            one_direction("LSTM", gates, w, self.steps, h0, h0.double())
        with pytest.raises(ValueError, match=r"w_hh.*float32.*got torch.float64"):
            one_direction("LSTM", gates, w.double(), self.steps, h0, h0)
        narrow = torch.zeros(H, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"peephole_o.*float32.*got torch.bfloat16"):
            one_direction("LSTM", gates, w, self.steps, peephole_o=narrow)

    def test_shapes(self) -> None:
        gates, w = torch.randn(5, 3 * H), torch.randn(3 * H, H)
        with pytest.raises(ValueError, match=r"w_hh .* 4 × 2 rows for LSTM, got 6"):
            one_direction("LSTM", gates, w, self.steps)
        with pytest.raises(ValueError, match=r"x .*\(7, 6\), got \(5, 6\)"):
            one_direction("GRU", gates, w, Steps((3, 3, 1)))
        with pytest.raises(ValueError, match=r"h0 .*\(1, 3, 2\), got \(1, 2, 2\)"):
            one_direction("GRU", gates, w, self.steps, torch.zeros(2, H))
        with pytest.raises(ValueError, match=r"bias_hn .*\(2,\), got \(3,\)"):
            one_direction("GRU", gates, w, self.steps, bias_hn=torch.zeros(3))

    def test_what_there_is_not(self) -> None:
        with pytest.raises(ValueError, match="unknown mode 'RNN_GELU'"):
            one_direction("RNN_GELU", torch.randn(5, H), torch.randn(H, H), self.steps)
        weights, zeros = [Weights(None, torch.randn(3 * H, H))], torch.zeros(1, 3, H)
        gates = torch.randn(5, 3 * H)
        with pytest.raises(ValueError, match=r"GRU .* takes no c0"):
            recur("GRU", (False,), self.steps, gates, weights, Norm(), (zeros, zeros))
        with pytest.raises(ValueError, match="takes no w_hh_1"):
            recur("GRU", (False,), self.steps, gates, weights * 2, Norm())
        with pytest.raises(ValueError, match="unknown norm 'rows'"):
            recur("GRU", (False,), self.steps, gates, weights, Norm("rows"))

    @pytest.mark.parametrize("sizes", [(2, 3), (-1,), (3, -1), (2, 0), (2.0,)])
    def test_sizes_of_no_packed_batch(self, sizes: Any) -> None:
        with pytest.raises((ValueError, TypeError)):
            Steps(sizes)

    @pytest.mark.parametrize("reverse", [(), (False, True, False)])
    def test_numbers_of_directions(self, reverse: tuple[bool, ...]) -> None:
        weights = [Weights(None, torch.randn(3 * H, H))]
        with pytest.raises(ValueError, match="one or two directions"):
            recur("GRU", reverse, self.steps, torch.randn(5, 3 * H), weights, Norm())


def test_final_state_of_each_direction() -> None:
    """Backwards it is the state at frame 0, forwards the one at the last frame."""
    gates, w = torch.arange(1.0, 7.0).view(6, 1), torch.zeros(1, 1)
    for reverse, last in ((True, [1, 2, 3]), (False, [6, 5, 3])):
        _, h = one_direction("RNN_RELU", gates, w, Steps((3, 2, 1)), reverse=reverse)
        assert h.flatten().tolist() == last


def test_a_new_cell_or_norm_needs_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the table and a function or class of the loop are enough, in float32 too."""
    monkeypatch.setitem(call.CELLS, "NEW", call.CELLS["RNN_TANH"])
    monkeypatch.setitem(loops.STEPS, "NEW", loops.STEPS["RNN_TANH"])
    monkeypatch.setitem(call.NORMS, "new", call.NORMS["none"])
    monkeypatch.setitem(loops.StepNorm.KINDS, "new", loops.StepNorm.KINDS["none"])
    importlib.reload(kernel)  # with the new rows, as if they were part of the source
    try:
        weights = [Weights(None, torch.randn(H, H))]
        gates = torch.randn(7, H)
        steps, known, new = Steps((3, 3, 1)), ("RNN_TANH", "none"), ("NEW", "new")
        results = []
        for mode, kind in (known, (known[0], new[1]), (new[0], known[1])):
            spec, tensors = describe_call(mode, (False,), gates, weights, Norm(kind))
            assert kernel.can_run(spec, tensors) <= ((mode, kind) == known)
            results.append(ops.recur(spec, steps, tensors).rows)
        for result in results[1:]:
            torch.testing.assert_close(result, results[0])
    finally:
        monkeypatch.undo()
        importlib.reload(kernel)
