"""Every token but the first is predicted exactly once, after the token before it."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from normrnn.engine.ranks import Ranks
from normrnn.text.task import Window, sequences, stream_windows


def read(windows: list[Window], n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of all windows of a text whose tokens are their positions."""
    found = [window.read(torch.arange(n)) for window in windows]
    for inputs, targets in found:
        assert torch.equal(targets, inputs + 1)
        # Down a column the text goes on.
        assert torch.equal(inputs, inputs[0] + torch.arange(len(inputs))[:, None])
    predicted = torch.cat([targets.flatten() for _, targets in found])
    assert sorted(predicted.tolist()) == list(range(1, n))
    return found


@given(st.data(), st.integers(1, 9), st.integers(1, 7), st.integers(1, 3))
def test_streams(data: st.DataObject, batch: int, steps: int, size: int) -> None:
    n = data.draw(st.integers(batch + 1, 80))
    windows = stream_windows(n, batch, steps)
    found = read(windows, n)
    # A column goes on where it stopped in the window before.
    for (before, _), (after, _) in pairwise(found):
        assert torch.equal(after[0], before[-1, : after.shape[1]] + 1)
    full = ((n - 1) // batch) // steps
    assert all(inputs.shape == (steps, batch) for inputs, _ in found[:full])
    for window, (inputs, _) in zip(windows, found, strict=True):
        shares = [window.read(torch.arange(n), Ranks(rank, size))[0] for rank in range(size)]
        assert torch.equal(torch.cat(shares, 1), inputs)
        # The state of a rank's streams is theirs in every window.
        first = windows[0].read(torch.arange(n), Ranks(size - 1, size))[0]
        own = first[0, : shares[-1].shape[1]] - first[0, :1]
        assert torch.equal(shares[-1][0] - shares[-1][0, :1], own)


@given(st.data(), st.integers(1, 9), st.integers(1, 7), st.integers(1, 3))
def test_shifted_streams(data: st.DataObject, batch: int, steps: int, size: int) -> None:
    """Every stream reads its own part once, from another place in each epoch."""
    n = data.draw(st.integers(batch + 1, 80))
    length = (n - 1) // batch
    fixed, shifted = stream_windows(n, batch, steps), stream_windows(n, batch, steps, seed=3)
    assert [w.length for w in shifted] == [w.length for w in fixed]
    ids, columns = torch.arange(n), []
    for window in shifted:
        inputs, targets = window.read(ids)
        assert torch.equal(targets, inputs + 1)
        shares = [window.read(ids, Ranks(rank, size))[0] for rank in range(size)]
        assert torch.equal(torch.cat(shares, 1), inputs)
        columns += [inputs] if inputs.shape[1] == batch else []
    streams = torch.cat(columns)[:length]
    whole = torch.cat([w.read(ids)[0] for w in fixed if len(w) == batch])[:length]
    for stream, part in zip(streams.T, whole.T, strict=True):
        assert torch.equal(stream.roll(-int(stream.argmin())), stream.sort().values)
        assert torch.equal(stream.sort().values, part)


def test_shifted_streams_meet_other_streams() -> None:
    """The tokens of a mini-batch differ from epoch to epoch, and are the same for a seed."""
    n, epochs = 32 * 100 + 1, []
    for seed in (1, 2, 1):
        first = stream_windows(n, 32, 10, seed)[0].read(torch.arange(n))[0]
        epochs.append((first[0] % 100).tolist())
    assert epochs[0] == epochs[2] != epochs[1]
    assert len(set(epochs[0])) > 16


@given(st.integers(2, 80), st.integers(1, 9), st.integers(1, 7))
def test_sequences(n: int, batch: int, steps: int) -> None:
    for inputs, _ in read(sequences(n, batch, steps), n):
        assert inputs.shape[0] <= steps
        assert inputs.shape[1] <= batch
        assert (inputs[0] % steps == 0).all()


def test_an_epoch_is_whole_sequences_in_an_order_of_its_own() -> None:
    n = 5 * 23 + 4  # 23 sequences: 5 batches of 4, 3 sequences left out

    def starts(seed: int | None) -> list[int]:
        windows = sequences(n, 4, 5, seed)[:5]
        return torch.cat([window.read(torch.arange(n))[0][0] for window in windows]).tolist()

    first = starts(1)
    assert len(set(first)) == 20
    assert all(start % 5 == 0 for start in first)
    assert len({tuple(order) for order in (first, starts(2), starts(None))}) == 3
    assert starts(1) == first


def test_penn_treebank_counts() -> None:
    assert sum(len(w) * w.length for w in stream_windows(73_760, 32, 20)) == 73_759
    assert sum(len(w) * w.length for w in sequences(393_042, 32, 100)) == 393_041
    assert sum(len(w) == 32 for w in sequences(5_017_482, 32, 100)) == 1567
