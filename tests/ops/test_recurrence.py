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


GATES, W, H0 = torch.randn(5, 3 * H), torch.randn(3 * H, H), torch.zeros(1, 3, H)
ONE: Any = (False,)
WRONG: dict[str, tuple[str, Any, int, Norm, Any, Any]] = {
    # float32 gates with a float64 state once gave numbers from nowhere.
    "h0.*float32.*float64": ("GRU", ONE, 1, Norm(), (H0.double(),), None),
    r"h0 .*\(1, 3, 2\), got \(1, 2, 2\)": ("GRU", ONE, 1, Norm(), (H0[:, :2],), None),
    "takes no c0": ("GRU", ONE, 1, Norm(), (H0, H0), None),
    "takes no w_hh_1": ("GRU", ONE, 2, Norm(), None, None),
    r"resets .*bool.*\(5,\).*float32": ("GRU", ONE, 1, Norm(), None, torch.zeros(5)),
    "w_hh .* 4 × 2 rows for LSTM, got 6": ("LSTM", ONE, 1, Norm(), None, None),
    "'RNN_GELU'": ("RNN_GELU", ONE, 1, Norm(), None, None),
    "'rows'": ("GRU", ONE, 1, Norm("rows"), None, None),
    "one or two directions": ("GRU", (), 1, Norm(), None, None),
}
"""By what the error names: mode, directions, number of weights, norm, state and resets."""


@pytest.mark.parametrize("match", WRONG)
def test_a_call_refuses(match: str) -> None:
    """Other shapes, types and devices of every tensor are refused in test_operators.py."""
    mode, reverse, count, *rest = WRONG[match]
    with pytest.raises(ValueError, match=match):
        recur(mode, reverse, Steps((3, 2)), GATES, [Weights(None, W)] * count, *rest)


@pytest.mark.parametrize("sizes", [(2, 3), (-1,), (3, -1), (2, 0), (2.0,)])
def test_sizes_of_no_packed_batch(sizes: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Steps(sizes)


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
