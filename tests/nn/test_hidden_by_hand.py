"""Per-step statistics of norm="hidden" by hand: one unit, two sequences, two steps."""

import math
from typing import Any

import pytest
import torch

import normrnn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the C kernels and the loop
def test_statistics_of_each_step(dtype: torch.dtype) -> None:
    layer: Any = normrnn.RNN(1, 1, norm="hidden", time_steps=3, dtype=dtype)
    w, u, gamma, beta, eps = 0.5, 2.0, 1.5, 0.25, 1e-5
    with torch.no_grad():
        layer.weight_ih_l0.fill_(w)
        layer.weight_hh_l0.fill_(u)
        layer.norm_l0.weight.fill_(gamma)
        layer.norm_l0.bias.fill_(beta)
    first, second = (1.0, 3.0), (-2.0, 5.0)
    output, _ = layer(torch.tensor([first, second], dtype=dtype)[:, :, None])

    def step(sums: list[float]) -> tuple[list[float], float, float]:
        mean = (sums[0] + sums[1]) / 2
        var = (sums[0] - mean) ** 2  # biased: both rows are as far from the mean
        h = [math.tanh(gamma * (s - mean) / math.sqrt(var + eps) + beta) for s in sums]
        return h, mean, 2 * var  # unbiased, as the buffers hold it

    # Step 1: the sums are 0.5 and 1.5, mean 1, variance 0.25, normalised −1 and 1: h is tanh of
    # −1.5 + 0.25 and 1.5 + 0.25. Step 2: −1 + 2·h and 2.5 + 2·h, −2.69655 and 4.38274.
    h1, mean1, var1 = step([w * x for x in first])
    assert (mean1, var1) == (1.0, 0.5)
    assert h1 == pytest.approx([-0.848284, 0.941376], abs=1e-4)
    h2, mean2, var2 = step([w * x + u * h for x, h in zip(second, h1, strict=True)])
    assert (mean2, var2) == pytest.approx((0.8431, 25.058), rel=1e-4)
    assert h2 == pytest.approx([math.tanh(-1.25), math.tanh(1.75)], abs=1e-5)
    close: Any = {"rel": 1e-5, "abs": 1e-6}
    assert output[:, :, 0].tolist() == [pytest.approx(h1, **close), pytest.approx(h2, **close)]
    norm = layer.norm_l0
    assert norm.running_mean[:, 0].tolist() == pytest.approx([0.1 * mean1, 0.1 * mean2, 0], **close)
    expected = [0.9 + 0.1 * var1, 0.9 + 0.1 * var2, 1]
    assert norm.running_var[:, 0].tolist() == pytest.approx(expected, **close)
    assert norm.num_batches_tracked.tolist() == [1, 1, 0]

    # At test time each step uses its own slot, a later one the last that was ever updated.
    layer.eval()
    x = torch.tensor([0.3, -0.4, 0.8], dtype=dtype)[:, None, None]
    h, wanted = 0.0, []
    for t, value in enumerate((0.3, -0.4, 0.8)):
        slot = min(t, 1)
        mean, var = 0.1 * (mean1, mean2)[slot], expected[slot]
        h = math.tanh(gamma * (w * value + u * h - mean) / math.sqrt(var + eps) + beta)
        wanted.append(h)
    assert layer(x)[0].flatten().tolist() == pytest.approx(wanted, **close)
