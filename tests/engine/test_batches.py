"""Batches of sequences: everything once, similar lengths, one order per seed and epoch."""

from itertools import combinations, pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from normrnn.engine.task import evenly_spread, shuffled_batches, sorted_batches

lengths = st.lists(st.integers(1, 200), min_size=1, max_size=40)


@given(lengths, st.integers(1, 9), st.integers(1, 5), st.integers(0, 3))
def test_every_sequence_once(lengths: list[int], batch: int, pool: int, epoch: int) -> None:
    batches = shuffled_batches(lengths, batch, pool, seed=1, epoch=epoch)
    full, rest = divmod(len(lengths), batch)
    is_joined = rest == 1 and full and batch > 1  # a single sequence has no statistics of a step
    sizes = [batch] * (full - 1) + [batch + 1] if is_joined else [batch] * full + [rest][: rest > 0]
    for some in (batches, sorted_batches(lengths, batch)):
        assert sorted(i for b in some for i in b) == list(range(len(lengths)))
        assert sorted(len(b) for b in some) == sorted(sizes)
    assert batches == shuffled_batches(lengths, batch, pool, seed=1, epoch=epoch)


def test_order_changes_with_epoch_and_seed() -> None:
    each = [(seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    orders = [shuffled_batches(range(1, 41), 4, 3, seed=s, epoch=e) for s, e in each]
    assert all(a != b for a, b in combinations(orders, 2))


def test_batches_hold_similar_lengths_but_come_in_random_order() -> None:
    lengths = torch.randperm(400).add(1).tolist()
    batches = shuffled_batches(lengths, 4, 25, seed=1, epoch=0)
    spreads = [max(lengths[i] for i in b) - min(lengths[i] for i in b) for b in batches]
    assert sum(spreads) / len(spreads) < 20  # four drawn from all would spread over about 240
    longest = [max(lengths[i] for i in b) for b in batches]
    assert any(a > b for a, b in pairwise(longest))
    assert any(a < b for a, b in pairwise(longest))


def test_evaluation_goes_by_length() -> None:
    assert sorted_batches([5, 2, 9, 1, 7], 3) == [[3, 1, 0], [4, 2]]
    assert sorted_batches([5, 2, 9, 1], 3) == [[3, 1, 0, 2]]


def test_some_of_all() -> None:
    assert [evenly_spread(*sizes) for sizes in ((3, 9), (5, 2), (0, 4))] == [[0, 3, 6], [0, 1], []]
