"""Fixed sequences: every symbol predicted once, orders that (seed, epoch) determine."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normrnn.errors import UserError
from normrnn.text.sequences import Sequences


@given(st.integers(2, 80), st.integers(1, 9), st.integers(1, 7))
def test_every_symbol_but_the_first_is_predicted_once(n: int, batch: int, steps: int) -> None:
    windows = list(Sequences(torch.arange(n), batch).windows(steps))
    assert sorted(torch.cat([w.targets.flatten() for w in windows]).tolist()) == list(range(1, n))
    for window in windows:
        assert torch.equal(window.targets, window.inputs + 1)
        assert window.inputs.shape[0] <= steps
        assert window.inputs.shape[1] <= batch
        # Down a column the text goes on; every column starts at a multiple of the length.
        assert torch.equal(
            window.inputs, window.inputs[0] + torch.arange(len(window.inputs))[:, None]
        )
        assert (window.inputs[0] % steps == 0).all()
    assert all(w.inputs.shape == (steps, batch) for w in windows[: (n - 1) // steps // batch])


def test_an_epoch_is_whole_sequences_in_an_order_of_its_own() -> None:
    text = Sequences(torch.arange(5 * 23 + 4), 4)
    assert text.count(5) == 5  # 23 sequences: 5 batches of 4, 3 sequences left out

    def starts(seed: int, epoch: int) -> list[int]:
        windows = [text.shuffled(seed, epoch, i, 5) for i in range(5)]
        assert all(w.inputs.shape == (5, 4) for w in windows)
        assert all(torch.equal(w.targets, w.inputs + 1) for w in windows)
        return torch.cat([w.inputs[0] for w in windows]).tolist()

    first = starts(1, 0)
    assert len(set(first)) == 20
    assert all(start % 5 == 0 for start in first)
    orders = [first, starts(1, 1), starts(2, 0), sorted(first)]
    assert len({tuple(order) for order in orders}) == 4
    assert starts(1, 0) == first
    fresh = Sequences(torch.arange(5 * 23 + 4), 4)
    # Known without what came before: a run can resume at any batch.
    assert fresh.shuffled(1, 0, 3, 5).inputs[0].tolist() == first[12:16]


def test_penn_treebank_counts() -> None:
    valid = Sequences(torch.zeros(393_042, dtype=torch.long), 32)
    assert sum(w.targets.numel() for w in valid.windows(100)) == 393_041
    train = Sequences(torch.zeros(5_017_482, dtype=torch.long), 32)
    assert train.count(100) == 1567


def test_too_short_a_text_is_named() -> None:
    with pytest.raises(UserError, match="the training text has 2 sequences of 3 tokens; a batch"):
        Sequences(torch.arange(8), 4, "training text").count(3)
    with pytest.raises(UserError, match="the test text has 1 tokens"):
        Sequences(torch.arange(1), 4, "test text")
