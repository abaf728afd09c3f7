"""Learning rates, optimisers and clipping."""

import pytest
import torch
from torch import nn

from normrnn.config.base import OptimizerConfig
from normrnn.engine.loop import build_optimizer, clip_gradients, learning_rate
from normrnn.recipes import recipe


@pytest.mark.parametrize(
    ("name", "epoch", "lr"),
    [
        ("ptb-small", 6, 1.0),
        ("ptb-small", 7, 0.5),
        ("ptb-small", 15, 2.0**-9),
        ("ptb-medium", 6, 1.0),
        ("ptb-medium", 8, 1.2**-2),
        ("ptb-large", 15, 1.0),
        ("ptb-large", 16, 1 / 1.15),
        ("ptb-small-authors", 4, 1.0),
        ("ptb-small-authors", 5, 0.5),
    ],
)
def test_learning_rate_of_an_epoch_of_the_paper(name: str, epoch: int, lr: float) -> None:
    assert learning_rate(recipe(name).optimizer, epoch - 1) == pytest.approx(lr)


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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("rmsprop", torch.optim.RMSprop),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
    ],
)
def test_optimisers_by_name(name, kind: type) -> None:
    config = OptimizerConfig(name=name, lr=0.25, weight_decay=0.5)
    optimizer = build_optimizer(config, [nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is kind
    assert optimizer.defaults["lr"] == 0.25
    assert optimizer.defaults["weight_decay"] == 0.5
