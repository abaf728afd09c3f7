"""Layer normalisation: by hand, row by row, and what it does not need."""

import math
from typing import Any

import pytest
import torch

import normrnn
from tests.helpers import build


def standardised(values: list[float], eps: float = 1e-5) -> list[float]:
    mean = sum(values) / len(values)
    var = sum((v - mean) ** 2 for v in values) / len(values)
    return [(v - mean) / math.sqrt(var + eps) for v in values]


@pytest.mark.filterwarnings("ignore:norm=.layer. of a single input feature")
def test_two_units_and_two_steps_by_hand() -> None:
    layer: Any = normrnn.RNN(1, 2, norm="layer", dtype=torch.float64)
    w_x, w_h = [0.5, -1.0], [[0.3, -0.2], [0.4, 0.9]]
    gamma_x, gamma_h, beta = [1.5, 0.5], [2.0, -1.0], [0.25, -0.5]
    with torch.no_grad():
        layer.weight_ih_l0.copy_(torch.tensor(w_x)[:, None])
        layer.weight_hh_l0.copy_(torch.tensor(w_h))
        layer.norm_l0.weight.copy_(torch.tensor(gamma_x))
        layer.norm_l0.gamma_hh.copy_(torch.tensor(gamma_h))
        layer.norm_l0.bias.copy_(torch.tensor(beta))
    output, _ = layer(torch.tensor([[[2.0]], [[-3.0]]], dtype=torch.float64))
    h = [0.0, 0.0]
    for t, x in enumerate((2.0, -3.0)):
        a = standardised([w * x for w in w_x])
        b = standardised([sum(u * v for u, v in zip(row, h, strict=True)) for row in w_h])
        parts = zip(gamma_x, a, gamma_h, b, beta, strict=True)
        h = [math.tanh(gx * p + gh * q + be) for gx, p, gh, q, be in parts]
        assert output[t, 0].tolist() == pytest.approx(h)


@pytest.mark.filterwarnings("ignore:norm=.layer. of a single input feature")
def test_the_cell_by_hand() -> None:
    """c goes on as it is; what is shown of it is normalised."""
    layer: Any = normrnn.LSTM(1, 2, norm="layer", cell_norm=True, dtype=torch.float64)
    with torch.no_grad():
        layer.norm_l0.weight_c.copy_(torch.tensor([2.0, 0.5]))
        layer.norm_l0.bias_c.copy_(torch.tensor([0.1, -0.3]))
    x = torch.tensor([[[0.7]]], dtype=torch.float64)
    output, (_, c) = layer(x)
    gates = standardised((layer.weight_ih_l0.flatten() * 0.7).tolist())
    i, _, g, o = (gates[k : k + 2] for k in (0, 2, 4, 6))
    cell = [math.tanh(b) / (1 + math.exp(-a)) for a, b in zip(i, g, strict=True)]
    assert c.flatten().tolist() == pytest.approx(cell)
    a, b = standardised(cell)
    shown = [math.tanh(2 * a + 0.1), math.tanh(0.5 * b - 0.3)]
    expected = [s / (1 + math.exp(-v)) for s, v in zip(shown, o, strict=True)]
    assert output.flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("cell", ["tanh", "lstm", "gru"])
class TestRowsByThemselves:
    def test_training_and_eval_are_the_same(self, cell: str) -> None:
        layer = build(cell, "layer")
        x = torch.randn(1, 1, 3, dtype=torch.float64)
        trained = layer(x)[0]
        assert torch.equal(layer.eval()(x)[0], trained)
        with normrnn.batch_statistics(layer):
            assert torch.equal(layer(x)[0], trained)
        with pytest.warns(UserWarning, match="nothing to do"):
            assert normrnn.recalibrate(layer, [x]) is layer
        assert not list(layer.buffers())

    def test_the_future_is_not_seen(self, cell: str) -> None:
        layer, x = build(cell, "layer"), torch.randn(4, 3, 3, dtype=torch.float64)
        later = x.clone()
        later[3] += 1
        assert torch.equal(layer(x)[0][:3], layer(later)[0][:3])
