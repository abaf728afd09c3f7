"""Learning rates and optimisers."""

from collections.abc import Iterable

import torch
from torch import nn

from normrnn.config.base import OptimizerConfig


def learning_rate(config: OptimizerConfig, epoch: int) -> float:
    """Learning rate of an epoch (0-based): a function of its number alone, so runs can be extended.

    >>> config = OptimizerConfig(lr=1.0, decay=2.0, decay_after=6)
    >>> [learning_rate(config, epoch) for epoch in (0, 5, 6, 7)]
    [1.0, 1.0, 0.5, 0.25]
    """
    decays = max(0, epoch + 1 - config.decay_after)
    return config.lr / config.decay**decays


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimiser the config names."""
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters,
            config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            foreach=True,
        )
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
    return kind(parameters, config.lr, weight_decay=config.weight_decay, foreach=True)


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> float:
    """Scale all gradients down to the global norm `limit` (0: never); the norm before that."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, foreach=True)
    value = norm.item()
    # Most updates are within the limit: multiplying by 1 would be a pass over memory for nothing.
    if limit and value > limit:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm, foreach=True)
    return value
