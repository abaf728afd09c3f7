"""Statistics of test time as functions: hand-computed numbers, slots, populations."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from normrnn.ops import Population, Statistics, slots_for, update_running_
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
    K = len(tracked)
    mean = torch.full((K, 1), 10.0).double()
    return mean, torch.full((K, 1), 2.0).double(), torch.tensor(tracked)


def test_torchs_momentum_and_the_unbiased_variance() -> None:
    """Rows 1, 2, 6 have mean 3, biased variance 14/3, unbiased 7."""
    buffers = shared()
    update_running_(*buffers, of([1.0, 2.0, 6.0]), 0.1)
    assert [b.item() for b in buffers] == [pytest.approx(9.3), pytest.approx(2.5), 1]
    update_running_(*buffers, of([1.0, 2.0, 6.0]), 1.0)
    assert [b.item() for b in buffers] == [pytest.approx(3), pytest.approx(7), 2]
    update_running_(*buffers, of([0.0, 0.0]), 0.0)
    assert [b.item() for b in buffers] == [pytest.approx(3), pytest.approx(7), 3]


def test_shared_buffers_see_all_rows_of_all_steps() -> None:
    buffers = shared()
    update_running_(*buffers, of([1.0], [2.0, 6.0]), 1.0)
    assert [b.item() for b in buffers] == [pytest.approx(3), pytest.approx(7), 1]


def test_cumulative_average() -> None:
    buffers = shared()
    for k in (1.0, 2.0, 6.0):
        update_running_(*buffers, of([k - 1, k + 1]), None)
    assert [b.item() for b in buffers] == [pytest.approx(3, abs=1e-12), pytest.approx(2), 3]


def test_cumulative_average_counts_every_slot_for_itself() -> None:
    buffers = slots([0, 4])
    update_running_(*buffers, of([0.0, 2.0], [0.0, 2.0]), None)
    assert buffers[0].flatten().tolist() == pytest.approx([1, 10 + (1 - 10) / 5])
    assert buffers[2].tolist() == [1, 5]


def test_slots_are_updated_by_their_own_step() -> None:
    """The lone row of step 1 and the steps past the last slot update nothing."""
    buffers = slots([0, 0, 0])
    update_running_(*buffers, of([0.0, 2.0], [5.0], [2.0, 6.0], [100.0, 300.0]), 0.5)
    assert buffers[0].flatten().tolist() == pytest.approx([5.5, 10, 7])
    assert buffers[1].flatten().tolist() == pytest.approx([2, 2, 5])
    assert buffers[2].tolist() == [1, 0, 1]


def test_a_short_batch_leaves_later_slots_alone() -> None:
    buffers = slots([0, 0, 0])
    update_running_(*buffers, of([0.0, 2.0]), 0.5)
    assert buffers[0].flatten().tolist() == pytest.approx([5.5, 10, 10])
    assert buffers[2].tolist() == [1, 0, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 1, 2, 3])
def test_nothing_is_updated_by_a_batch_that_is_not_finite(bad: float, where: int) -> None:
    """Wherever it is: in a used slot, in a lone row, past the last slot."""
    groups = [[0.0, 2.0], [2.0, 6.0], [5.0], [1.0, 3.0]]
    groups[where][0] = bad
    for momentum in (0.5, None):
        buffers = slots([0, 1, 2])
        update_running_(*buffers, of(*groups), momentum)
        assert buffers[0].flatten().tolist() == [10, 10, 10]
        assert buffers[1].flatten().tolist() == [2, 2, 2]
        assert buffers[2].tolist() == [0, 1, 2]
        one = shared(tracked=3)
        update_running_(*one, of(*groups), momentum)
        assert [b.item() for b in one] == [10, 2, 3]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 9))
def test_slot_of_a_step(tracked: list[int], steps: int) -> None:
    slot = slots_for(torch.tensor(tracked), steps).tolist()
    assert slot == [last_updated(t, tracked) for t in range(steps)]


@given(
    st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=6), min_size=1, max_size=6).filter(
        lambda batches: sum(map(len, batches)) > 1
    )
)
def test_a_population_does_not_depend_on_the_split(batches: list[list[float]]) -> None:
    population = Population()
    for batch in batches:
        population.add(of(batch))
    whole = torch.tensor([x for batch in batches for x in batch], dtype=torch.float64)
    torch.testing.assert_close(population.mean[0, 0], whole.mean(), rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(population.var[0, 0], whole.var(), rtol=1e-10, atol=1e-9)
    biased = whole.var(correction=0)
    torch.testing.assert_close(population.biased_var[0, 0], biased, rtol=1e-10, atol=1e-9)
    assert population.enough.tolist() == [[True]]


def test_a_population_of_slots() -> None:
    population = Population(3)
    population.add(of([0.0, 2.0], [5.0], [1.0]))
    population.add(of([4.0], [7.0], [3.0], [1000.0]))
    population.add(of([4.0]))
    assert population.mean[:, 0].tolist() == pytest.approx([2.5, 6, 2])
    assert population.var[:, 0].tolist() == pytest.approx([11 / 3, 2, 2])
    short = Population(2)
    short.add(of([1.0, 3.0], [5.0]))
    assert short.enough.tolist() == [[True], [False]]


def test_a_population_leaves_out_batches_that_are_not_finite() -> None:
    population = Population()
    population.add(of([0.0, float("nan")]))
    assert population.batches == 0
    population.add(of([0.0, 2.0]))
    population.add(of([0.0, float("inf")]))
    assert population.batches == 1
    assert population.mean.item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_of_single_rows_update_nothing(dtype: torch.dtype) -> None:
    """By the compiled kernel as by torch's operations; one larger group is enough."""
    mean, var, tracked = torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype), torch.tensor(0)
    batch = torch.randn(3, 2, dtype=dtype), torch.zeros(3, 2, dtype=dtype)
    update_running_(mean, var, tracked, Statistics(*batch, torch.ones(3, dtype=dtype)), 0.1)
    assert int(tracked) == 0
    assert torch.equal(mean, torch.zeros(2, dtype=dtype))
    assert torch.equal(var, torch.ones(2, dtype=dtype))
    count = torch.tensor([2.0, 1.0, 1.0], dtype=dtype)
    update_running_(mean, var, tracked, Statistics(*batch, count), 0.1)
    assert int(tracked) == 1


@pytest.mark.parametrize("momentum", [0.5, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_that_counts_nothing_changes_nothing(
    dtype: torch.dtype, momentum: float | None
) -> None:
    """By the compiled kernel as by torch's operations."""
    mean, var, tracked = torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype), torch.tensor(0)
    values = torch.tensor([[1.0, 2.0], [torch.nan, torch.nan]], dtype=dtype)
    count = torch.tensor([3.0, 0.0], dtype=dtype)
    update_running_(mean, var, tracked, Statistics(values, values.clone(), count), momentum)
    share = 1.0 if momentum is None else momentum
    assert mean.tolist() == pytest.approx([share, share * 2])
    assert var.tolist() == pytest.approx([1 + share * (1.5 - 1), 1 + share * (3.0 - 1)])
    assert int(tracked) == 1
