"""Every token but the first is predicted exactly once, after the token before it."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normrnn.errors import UserError
from normrnn.text.streams import Streams


@given(st.data(), st.integers(1, 9), st.integers(1, 7))
def test_every_token_but_the_first_is_predicted_once(
    data: st.DataObject, batch: int, steps: int
) -> None:
    n = data.draw(st.integers(batch + 1, 80))
    streams = Streams(torch.arange(n), batch)
    windows = list(streams.windows(steps))
    predicted = torch.cat([w.targets.flatten() for w in windows])
    assert sorted(predicted.tolist()) == list(range(1, n))
    for window in windows:
        assert torch.equal(window.targets, window.inputs + 1)
    # A column goes on where it stopped in the window before.
    for before, after in pairwise(windows):
        columns = after.inputs.shape[1]
        assert torch.equal(after.inputs[0], before.inputs[-1, :columns] + 1)
    assert all(w.inputs.shape == (steps, batch) for w in windows[: len(streams) // steps])
    assert streams.count(steps) == len(windows) - (streams.tail is not None)


def test_penn_treebank_counts() -> None:
    streams = Streams(torch.arange(73_760), 32)
    assert sum(w.targets.numel() for w in streams.windows(20)) == 73_759


def test_too_short_a_text_is_named() -> None:
    with pytest.raises(UserError, match="the test text has 8 tokens; 8 streams need at least 9"):
        Streams(torch.arange(8), 8, "test text")
