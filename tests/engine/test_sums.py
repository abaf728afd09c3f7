"""Sums of a train row."""

import json
from dataclasses import asdict

import pytest

from normrnn.config.measure import perplexity
from normrnn.engine.sums import RowSums
from normrnn.speech.config import FRAMES
from normrnn.text.config import WORDS


def test_targets_are_pooled_and_updates_averaged() -> None:
    sums = RowSums()
    sums.add(20.0, 10, 1.0, None, WORDS)
    sums.add(3.0, 3, 4.0, None, WORDS)
    row = sums.row(WORDS)
    assert row["loss"] == pytest.approx(23 / 13)
    assert row["count"] == 13
    assert row["batch_ppl"] == pytest.approx((perplexity(2.0) + perplexity(1.0)) / 2)
    assert row["grad_norm"] == 2.5
    assert RowSums(**asdict(sums)).row(WORDS) == row


def test_errors() -> None:
    sums = RowSums()
    sums.add(20.0, 10, 1.0, 3, FRAMES)
    sums.add(3.0, 6, 1.0, 1, FRAMES)
    assert sums.row(FRAMES) == {"loss": 23 / 16, "fer": 0.25, "count": 16, "grad_norm": 1.0}


def test_a_diverging_batch_gives_a_finite_row() -> None:
    sums = RowSums()
    sums.add(1e9, 10, 1.0, None, WORDS)
    assert json.dumps(sums.row(WORDS), allow_nan=False)
