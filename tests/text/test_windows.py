"""Every token but the first is predicted exactly once, after the token before it."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normrnn.engine.ranks import Ranks
from normrnn.errors import UserError
from normrnn.text.windows import Sequences, Streams


def read(text: Streams | Sequences, n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of all windows of a text whose tokens are their positions."""
    windows = [window.read(torch.arange(n)) for window in text]
    for inputs, targets in windows:
        assert torch.equal(targets, inputs + 1)
        # Down a column the text goes on.
        assert torch.equal(inputs, inputs[0] + torch.arange(len(inputs))[:, None])
    predicted = torch.cat([targets.flatten() for _, targets in windows])
    assert sorted(predicted.tolist()) == list(range(1, n))
    return windows


@given(st.data(), st.integers(1, 9), st.integers(1, 7), st.integers(1, 3))
def test_streams(data: st.DataObject, batch: int, steps: int, size: int) -> None:
    n = data.draw(st.integers(batch + 1, 80))
    streams = Streams(n, batch, steps)
    windows = read(streams, n)
    # A column goes on where it stopped in the window before.
    for (before, _), (after, _) in pairwise(windows):
        assert torch.equal(after[0], before[-1, : after.shape[1]] + 1)
    full = ((n - 1) // batch) // steps
    assert all(inputs.shape == (steps, batch) for inputs, _ in windows[:full])
    assert streams.common == sum(inputs.shape[1] == batch for inputs, _ in windows)
    for window, (inputs, _) in zip(streams, windows, strict=True):
        shares = [window.read(torch.arange(n), Ranks(rank, size))[0] for rank in range(size)]
        assert torch.equal(torch.cat(shares, 1), inputs)
        # The state of a rank's streams is theirs in every window.
        first = streams[0].read(torch.arange(n), Ranks(size - 1, size))[0]
        rows = min(first.shape[1], shares[-1].shape[1])
        assert torch.equal(
            first[0, :rows] - first[0, :1], shares[-1][0, :rows] - shares[-1][0, :1]
        ) or (rows == 0)


@given(st.integers(2, 80), st.integers(1, 9), st.integers(1, 7))
def test_sequences(n: int, batch: int, steps: int) -> None:
    text = Sequences(n, batch, steps)
    windows = read(text, n)
    for inputs, _ in windows:
        assert inputs.shape[0] <= steps
        assert inputs.shape[1] <= batch
        assert (inputs[0] % steps == 0).all()
    assert text.common == (n - 1) // steps // batch
    assert all(inputs.shape == (steps, batch) for inputs, _ in windows[: text.common])


def test_an_epoch_is_whole_sequences_in_an_order_of_its_own() -> None:
    text = Sequences(5 * 23 + 4, 4, 5)
    assert text.common == 5  # 23 sequences: 5 batches of 4, 3 sequences left out

    def starts(seed: int) -> list[int]:
        shuffled = text.shuffled(seed)
        windows = [shuffled[i].read(torch.arange(5 * 23 + 4)) for i in range(5)]
        assert all(inputs.shape == (5, 4) for inputs, _ in windows)
        return torch.cat([inputs[0] for inputs, _ in windows]).tolist()

    first = starts(1)
    assert len(set(first)) == 20
    assert all(start % 5 == 0 for start in first)
    assert len({tuple(order) for order in (first, starts(2), sorted(first))}) == 3
    assert starts(1) == first


def test_penn_treebank_counts() -> None:
    assert sum(len(w) * w.length for w in Streams(73_760, 32, 20)) == 73_759
    assert sum(len(w) * w.length for w in Sequences(393_042, 32, 100)) == 393_041
    assert Sequences(5_017_482, 32, 100).common == 1567


def test_too_short_a_text_is_named() -> None:
    with pytest.raises(UserError, match=r"test text has 8 tokens.* 9"):
        Streams(8, 8, 1, "test text")
    with pytest.raises(UserError, match="test text has 1 tokens"):
        Sequences(1, 4, 1, "test text")
