"""Per-step statistics of the appendix, worked out by hand: one unit, two sequences, two steps."""

import math
from typing import Any

import pytest
import torch

import normrnn


def test_statistics_of_each_step() -> None:
    layer: Any = normrnn.RNN(1, 1, norm="hidden", time_steps=3, dtype=torch.float64)
    w, u, gamma, beta, eps = 0.5, 2.0, 1.5, 0.25, 1e-5
    with torch.no_grad():
        layer.weight_ih_l0.fill_(w)
        layer.weight_hh_l0.fill_(u)
        layer.norm_l0.weight.fill_(gamma)
        layer.norm_l0.bias.fill_(beta)
    first, second = (1.0, 3.0), (-2.0, 5.0)
    output, _ = layer(torch.tensor([first, second], dtype=torch.float64)[:, :, None])

    def step(sums: list[float]) -> tuple[list[float], float, float]:
        mean = (sums[0] + sums[1]) / 2
        var = (sums[0] - mean) ** 2  # biased: both rows are as far from the mean
        h = [math.tanh(gamma * (s - mean) / math.sqrt(var + eps) + beta) for s in sums]
        return h, mean, 2 * var  # unbiased, as the buffers hold it

    h1, mean1, var1 = step([w * x for x in first])
    h2, mean2, var2 = step([w * x + u * h for x, h in zip(second, h1, strict=True)])
    assert output[:, :, 0].tolist() == [pytest.approx(h1), pytest.approx(h2)]
    assert mean1 == 1.0
    norm = layer.norm_l0
    assert norm.running_mean[:, 0].tolist() == pytest.approx([0.1 * mean1, 0.1 * mean2, 0])
    expected = [0.9 + 0.1 * var1, 0.9 + 0.1 * var2, 1]
    assert norm.running_var[:, 0].tolist() == pytest.approx(expected)
    assert norm.num_batches_tracked.tolist() == [1, 1, 0]

    # At test time each step uses its own slot, a later one the last that was ever filled.
    layer.eval()
    x = torch.tensor([0.3, -0.4, 0.8], dtype=torch.float64)[:, None, None]
    h, wanted = 0.0, []
    for t, value in enumerate((0.3, -0.4, 0.8)):
        slot = min(t, 1)
        mean, var = 0.1 * (mean1, mean2)[slot], expected[slot]
        h = math.tanh(gamma * (w * value + u * h - mean) / math.sqrt(var + eps) + beta)
        wanted.append(h)
    assert layer(x)[0].flatten().tolist() == pytest.approx(wanted)
