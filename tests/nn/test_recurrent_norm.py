"""Batch normalisation of both transitions: by hand, its statistics, and what folds."""

from typing import Any

import pytest
import torch

import normrnn
from tests.helpers import build, close


def test_what_it_starts_with() -> None:
    """γ 0.1 and a normalised cell are its own; both can be said."""
    layer: Any = normrnn.LSTM(3, 2, norm="recurrent")
    n = layer.norm_l0
    for gamma in (n.weight, n.gamma_hh, n.weight_c):
        assert (gamma == 0.1).all()
    assert not n.bias.any()
    assert not n.bias_c.any()
    layer = normrnn.LSTM(3, 2, norm="recurrent", gamma=0.7, cell_norm=False)
    assert layer.norm_l0.weight_c is None
    assert (layer.norm_l0.gamma_hh == 0.7).all()
    assert "norm_l0.running_mean_c" not in layer.state_dict()
    assert normrnn.GRU(3, 2, norm="recurrent").norm_l0.cell_norm is False  # type: ignore


def test_a_batch_that_is_not_finite_changes_no_buffer() -> None:
    """Also where it is finite in the input transition and not in the other."""
    layer = build("lstm", "recurrent", cell_norm=True)
    before = {name: b.clone() for name, b in layer.named_buffers()}
    h = torch.zeros(1, 3, 2, dtype=torch.float64)
    h[0, 1, 0] = float("inf")
    x = torch.randn(4, 3, 3, dtype=torch.float64)
    layer(x, (h, torch.zeros_like(h)))
    assert all(torch.equal(b, before[name]) for name, b in layer.named_buffers())
    layer(x)
    assert not torch.equal(layer.norm_l0.running_mean_c, before["norm_l0.running_mean_c"])


@pytest.mark.parametrize("norm", ["recurrent", "recurrent-shared"])
def test_recalibrated_statistics_are_those_of_the_population(norm: str) -> None:
    """Of W_x x exactly, whatever the batches; of W_h h and c those of a batch that is all."""
    layer = build("lstm", norm)
    x = torch.randn(3, 8, 3, dtype=torch.float64)
    whole = build("lstm", norm, momentum=1.0)
    whole.load_state_dict(layer.state_dict())
    whole(x)
    normrnn.recalibrate(layer, [x])
    for name, value in whole.named_buffers():
        if "running" in name:
            close(dict(layer.named_buffers())[name], value, name)
    normrnn.recalibrate(layer, x.split([3, 5], 1))
    for name in ("running_mean", "running_var"):
        close(getattr(layer.norm_l0, name), getattr(whole.norm_l0, name), name)
