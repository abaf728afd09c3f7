"""Statistics of test time as functions: hand-computed numbers, slots, populations."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from normrnn.ops import Statistics, slots_for, update_running_
from tests.reference import last_updated


def of(*groups: list[float]) -> Statistics:
    """Statistics of one channel over groups of numbers."""
    parts = [torch.tensor(g, dtype=torch.float64) for g in groups]
    mean = torch.stack([p.mean() for p in parts]).unsqueeze(1)
    var = torch.stack([p.var(correction=0) for p in parts]).unsqueeze(1)
    return Statistics(mean, var, torch.tensor([float(len(g)) for g in groups]))


def shared(mean: float = 10.0, var: float = 2.0, tracked: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor([mean]).double(), torch.tensor([var]).double(), torch.tensor(tracked)


def slots(tracked: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    mean = torch.full((len(tracked), 1), 10.0).double()
    return mean, mean / 5, torch.tensor(tracked)


UPDATES: dict[str, tuple[Any, list[list[float]], float | None, Any, Any, Any]] = {
    # Rows 1, 2, 6 have mean 3, biased variance 14/3, unbiased 7.
    "momentum": (0, [[1, 2, 6]], 0.1, [9.3], [2.5], 1),
    "momentum 1": (4, [[1, 2, 6]], 1.0, [3], [7], 5),
    "momentum 0": (3, [[0, 0]], 0.0, [10], [2], 4),
    "all rows of all steps": (0, [[1], [2, 6]], 1.0, [3], [7], 1),
    "the first of a cumulative average": (0, [[0, 2]], None, [1], [2], 1),
    "cumulative": (3, [[0, 2]], None, [10 + (1 - 10) / 4], [2], 4),
    "cumulative, each slot by its own": ([0, 4], [[0, 2]] * 2, None, [1, 8.2], [2, 2], [1, 5]),
    # A single row and the steps past the last slot update nothing.
    "slots": ([0] * 3, [[0, 2], [5], [2, 6], [1, 3]], 0.5, [5.5, 10, 7], [2, 2, 5], [1, 0, 1]),
    "a short batch": ([0] * 3, [[0, 2]], 0.5, [5.5, 10, 10], [2, 2, 2], [1, 0, 0]),
}


@pytest.mark.parametrize("case", UPDATES)
def test_updates_by_hand(case: str) -> None:
    """Of buffers with mean 10 and variance 2."""
    tracked, groups, momentum, *wanted = UPDATES[case]
    buffers = slots(tracked) if isinstance(tracked, list) else shared(tracked=tracked)
    update_running_(*buffers, of(*groups), momentum)
    for found, expected in zip(buffers, wanted, strict=True):
        numbers = expected if isinstance(expected, list) else [expected]
        assert found.flatten().tolist() == pytest.approx(numbers)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 1, 2, 3])
def test_nothing_is_updated_by_a_batch_that_is_not_finite(bad: float, where: int) -> None:
    """Wherever it is: in a used slot, in a lone row, past the last slot."""
    groups = [[0.0, 2.0], [2.0, 6.0], [5.0], [1.0, 3.0]]
    groups[where][0] = bad
    for momentum in (0.5, None):
        for buffers in (slots([0, 1, 2]), shared(tracked=3)):
            before = [b.clone() for b in buffers]
            update_running_(*buffers, of(*groups), momentum)
            assert all(map(torch.equal, buffers, before))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 9))
def test_slot_of_a_step(tracked: list[int], steps: int) -> None:
    slot = slots_for(torch.tensor(tracked), steps).tolist()
    assert slot == [last_updated(t, tracked) for t in range(steps)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.5, None])
def test_single_rows_and_empty_groups(dtype: torch.dtype, momentum: float | None) -> None:
    """By the compiled kernel as by torch's operations; one larger group is enough."""
    mean, var, tracked = torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype), torch.tensor(0)
    values = torch.tensor([[1.0, 2.0], [torch.nan, torch.nan]], dtype=dtype)

    def update(first: float) -> list[list[float]]:
        count = torch.tensor([first, 0.0], dtype=dtype)
        update_running_(mean, var, tracked, Statistics(values, values.clone(), count), momentum)
        return [mean.tolist(), var.tolist(), [int(tracked)]]

    assert update(1.0) == [[0, 0], [1, 1], [0]]
    share = 1.0 if momentum is None else momentum
    wanted = [[share, share * 2], [1 + share * 0.5, 1 + share * 2], [1]]
    for found, expected in zip(update(3.0), wanted, strict=True):
        assert found == pytest.approx(expected)
