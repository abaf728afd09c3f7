"""Learning rates, optimisers and clipping."""

from typing import Any

import pytest
import torch
from torch import nn

from normrnn.config.base import OptimizerConfig
from normrnn.engine.loop import build_optimizer, clip_gradients, learning_rate
from normrnn.recipes import recipe


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("ptb-small", {6: 1.0, 7: 0.5, 15: 2.0**-9}),
        ("ptb-medium", {6: 1.0, 8: 1.2**-2}),
        ("ptb-large", {15: 1.0, 16: 1 / 1.15}),
        ("ptb-small-authors", {4: 1.0, 5: 0.5}),
    ],
)
def test_learning_rates_of_the_paper(name: str, rates: dict[int, float]) -> None:
    found = {epoch: learning_rate(recipe(name).optimizer, epoch - 1) for epoch in rates}
    assert found == pytest.approx(rates)


@pytest.mark.parametrize("limit", [0.0, 0.5, 1e3])
def test_clipping_is_torchs(limit: float) -> None:
    parameters = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5)), nn.Parameter()]
    for p in parameters[:2]:
        p.grad = torch.randn_like(p)
    copies = [nn.Parameter(p.detach().clone()) for p in parameters[:2]]
    for copy, p in zip(copies, parameters, strict=False):
        assert p.grad is not None
        copy.grad = p.grad.clone()
    norm = clip_gradients(parameters, limit)
    wanted = torch.nn.utils.clip_grad_norm_(copies, limit or float("inf"))
    assert norm == pytest.approx(wanted.item())
    for copy, p in zip(copies, parameters, strict=False):
        torch.testing.assert_close(p.grad, copy.grad)


@pytest.mark.parametrize("kind", ["SGD", "RMSprop", "Adam", "AdamW"])
def test_optimisers_by_name(kind: Any) -> None:
    config = OptimizerConfig(name=kind.lower(), lr=0.25, weight_decay=0.5)
    optimizer = build_optimizer(config, [nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is getattr(torch.optim, kind)
    assert [optimizer.defaults[name] for name in ("lr", "weight_decay")] == [0.25, 0.5]
