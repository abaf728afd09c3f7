"""The recurrence as a function: what it refuses, and what a new cell or norm needs."""

import importlib
from typing import Any

import pytest
import torch

from normrnn import ops
from normrnn.ops import Norm, Result, Steps, Weights, call, describe_call
from normrnn.ops import loop as loops
from normrnn.ops.native import kernel
from tests.kernel_cases import one_direction

H = 2


def recur(mode: str, reverse: tuple[bool, ...], steps: Steps, *args: Any) -> Result:
    spec, tensors = describe_call(mode, reverse, *args)
    return ops.recur(spec, steps, tensors)


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
