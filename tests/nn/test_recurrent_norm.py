"""Batch normalisation of both transitions: by hand, its statistics, and what folds."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import normrnn
from tests.helpers import build, close


def standardised(values: list[float], eps: float = 1e-5) -> list[float]:
    """One feature over the rows of a step."""
    mean = sum(values) / len(values)
    var = sum((v - mean) ** 2 for v in values) / len(values)
    return [(v - mean) / math.sqrt(var + eps) for v in values]


def unbiased(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, sum((v - mean) ** 2 for v in values) / (len(values) - 1)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def column(*steps: list[float]) -> Tensor:
    return torch.tensor(steps, dtype=torch.float64).unsqueeze(2)


def one_unit(**options: Any) -> Any:
    """h_t = tanh(0.5 BN(−1.5 h) + 2 BN(0.7 x) + 0.25)."""
    layer: Any = normrnn.RNN(1, 1, norm="recurrent", dtype=torch.float64, **options)
    with torch.no_grad():
        layer.weight_ih_l0.fill_(0.7)
        layer.weight_hh_l0.fill_(-1.5)
        layer.norm_l0.weight.fill_(2.0)
        layer.norm_l0.gamma_hh.fill_(0.5)
        layer.norm_l0.bias.fill_(0.25)
    return layer


X = ([1.0, 3.0, -2.0], [0.5, -1.0, 4.0])


def states_by_hand() -> tuple[list[list[float]], list[list[float]]]:
    """h of both steps, and the W_h h that each of them saw."""
    h, states, seen = [0.0, 0.0, 0.0], [], []
    for x in X:
        wh = [-1.5 * v for v in h]
        a, b = standardised([0.7 * v for v in x]), standardised(wh)
        h = [math.tanh(2 * p + 0.5 * q + 0.25) for p, q in zip(a, b, strict=True)]
        states.append(h)
        seen.append(wh)
    return states, seen


def test_two_steps_by_hand() -> None:
    output, _ = one_unit()(column(*X))
    for found, expected in zip(output, states_by_hand()[0], strict=True):
        assert found.flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("steps", [None, 2])
def test_its_statistics_by_hand(steps: int | None) -> None:
    """Both transitions have their own; shared over time they are those of all rows."""
    layer = one_unit(momentum=1.0, time_steps=steps)
    layer(column(*X))
    _, wh = states_by_hand()
    of_x = [[0.7 * v for v in x] for x in X]
    for which, rows in (("", of_x), ("_hh", wh)):
        slots = rows if steps else [rows[0] + rows[1]]
        means, variances = zip(*map(unbiased, slots), strict=True)
        n = layer.norm_l0
        assert getattr(n, f"running_mean{which}").flatten().tolist() == pytest.approx(means)
        assert getattr(n, f"running_var{which}").flatten().tolist() == pytest.approx(variances)


def test_the_cell_by_hand() -> None:
    """c goes on as it is; what is shown of it is normalised over the rows of the step."""
    layer: Any = normrnn.LSTM(1, 1, norm="recurrent", momentum=1.0, dtype=torch.float64)
    with torch.no_grad():
        layer.norm_l0.weight.fill_(1.5)
        layer.norm_l0.weight_c.fill_(2.0)
        layer.norm_l0.bias_c.fill_(-0.3)
    x = [0.7, -1.0, 2.0]
    output, (_, c) = layer(column(x))
    w = layer.weight_ih_l0.flatten().tolist()
    i, _, g, o = ([1.5 * v for v in standardised([k * v for v in x])] for k in w)
    cell = [sigmoid(a) * math.tanh(b) for a, b in zip(i, g, strict=True)]
    shown = [math.tanh(2 * v - 0.3) for v in standardised(cell)]
    assert c.flatten().tolist() == pytest.approx(cell)
    expected = [sigmoid(a) * s for a, s in zip(o, shown, strict=True)]
    assert output.flatten().tolist() == pytest.approx(expected)
    mean, var = unbiased(cell)
    assert layer.norm_l0.running_mean_c.item() == pytest.approx(mean)
    assert layer.norm_l0.running_var_c.item() == pytest.approx(var)


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
    with pytest.raises(ValueError, match="cell_norm=True is for an LSTM with norm='layer' or"):
        normrnn.GRU(3, 2, norm="recurrent", cell_norm=True)
    with pytest.raises(ValueError, match="sync=True does not work with norm='recurrent'"):
        normrnn.LSTM(3, 2, norm="recurrent", sync=True)


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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("cell", ["tanh", "relu", "lstm", "gru"])
def test_it_folds(cell: str, bidirectional: bool, bias: bool) -> None:
    options = {"bidirectional": bidirectional, "bias": bias, "dtype": torch.float32}
    layer = build(cell, "recurrent-shared", num_layers=2, **options).eval()
    plain = layer.fold()
    assert type(plain).__module__ == "torch.nn.modules.rnn"
    x = torch.randn(40, 5, 3)
    close(plain(x)[0], layer(x)[0], "folded", 1e-5)  # torch's kernel
    short = x[:4]  # fewer rows than folding pays for: our recurrence
    close(plain(short)[0], layer(short)[0], "folded", 1e-5)


def test_what_does_not_fold_says_why() -> None:
    with pytest.raises(ValueError, match=r"normalises the cell too \(cell_norm=False leaves"):
        normrnn.LSTM(3, 2, norm="recurrent").fold()
    with pytest.raises(ValueError, match="statistics that differ over 3 time steps"):
        normrnn.GRU(3, 2, norm="recurrent", time_steps=3).fold()


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
