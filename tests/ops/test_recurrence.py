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


GATES, W, H0 = torch.randn(5, 3 * H), torch.randn(3 * H, H), torch.zeros(3, H)
WIDE = torch.randn(5, 4 * H), torch.randn(4 * H, H)
WRONG: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = [
    # float32 gates with a float64 state once gave numbers from nowhere.
    ("c0.*float32.*float64", "LSTM", (*WIDE, (3, 2), H0, H0.double()), {}),
    ("w_hh.*float32.*float64", "LSTM", (WIDE[0], WIDE[1].double(), (3, 2), H0, H0), {}),
    ("peephole_o.*bfloat16", "LSTM", (*WIDE, (3, 2)), {"peephole_o": torch.zeros(H).bfloat16()}),
    ("w_hh .* 4 × 2 rows for LSTM, got 6", "LSTM", (GATES, W, (3, 2)), {}),
    (r"x .*\(7, 6\), got \(5, 6\)", "GRU", (GATES, W, (3, 3, 1)), {}),
    (r"h0 .*\(1, 3, 2\), got \(1, 2, 2\)", "GRU", (GATES, W, (3, 2), torch.zeros(2, H)), {}),
    (r"bias_hn .*\(2,\), got \(3,\)", "GRU", (GATES, W, (3, 2)), {"bias_hn": torch.zeros(3)}),
    (r"resets .*bool.*\(5,\).*float32", "GRU", (GATES, W, (3, 2)), {"resets": torch.zeros(5)}),
    ("'RNN_GELU'", "RNN_GELU", (torch.randn(5, H), torch.randn(H, H), (3, 2)), {}),
]


@pytest.mark.parametrize(("match", "mode", "given", "more"), WRONG)
def test_one_direction_refuses(match: str, mode: str, given: Any, more: dict[str, Any]) -> None:
    gates, w, sizes, *state = given
    with pytest.raises(ValueError, match=match):
        one_direction(mode, gates, w, Steps(sizes), *state, **more)


@pytest.mark.parametrize(
    ("match", "reverse", "count", "norm", "state"),
    [
        ("takes no c0", (False,), 1, Norm(), (H0[None], H0[None])),
        ("takes no w_hh_1", (False,), 2, Norm(), None),
        ("'rows'", (False,), 1, Norm("rows"), None),
        ("one or two directions", (), 1, Norm(), None),
        ("one or two directions", (False, True, False), 1, Norm(), None),
    ],
)
def test_a_call_refuses(match: str, reverse: Any, count: int, norm: Norm, state: Any) -> None:
    with pytest.raises(ValueError, match=match):
        recur("GRU", reverse, Steps((3, 2)), GATES, [Weights(None, W)] * count, norm, state)


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
