"""The loss over batches."""

import json
from dataclasses import asdict

import pytest

from normrnn.engine.loss import Sums
from normrnn.speech.config import FRAMES
from normrnn.text.config import WORDS


def test_targets_and_errors_are_pooled_and_remainders_are_not_in_means() -> None:
    sums = Sums()
    for total, count, errors, is_full in (
        (20.0, 10, 3, True),
        (3.0, 6, 1, True),
        (1.0, 4, 0, False),
    ):
        sums.add(total, count, errors, FRAMES, grad_norm=count, is_full=is_full)
    assert sums.row(FRAMES) == {"loss": 24 / 20, "fer": 0.2, "count": 20}
    assert sums.grad_norm / sums.batches == 8
    assert Sums(**asdict(sums)) == sums


def test_a_diverging_batch_gives_a_finite_row() -> None:
    sums = Sums()
    sums.add(1e9, 10, None, WORDS)
    assert json.loads(json.dumps(sums.row(WORDS), allow_nan=False))["loss"] == pytest.approx(1e8)
