"""Learning rates and optimisers."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from normrnn.config.base import OptimizerConfig


def learning_rate(config: OptimizerConfig, epoch: int) -> float:
    """Return the learning rate of an epoch (0-based); it depends on nothing else.

    >>> config = OptimizerConfig(lr=1.0, decay=2.0, decay_after=6)
    >>> [learning_rate(config, epoch) for epoch in (0, 5, 6, 7)]
    [1.0, 1.0, 0.5, 0.25]
    """
    decays = max(0, epoch + 1 - config.decay_after)
    return config.lr / config.decay**decays


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the optimiser of a config."""
    parameters = list(parameters)
    foreach = _all_at_once(parameters)
    if config.name in ("sgd", "rmsprop"):
        kind = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}[config.name]
        return kind(
            parameters,
            config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            foreach=foreach,
        )
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
    return kind(parameters, config.lr, weight_decay=config.weight_decay, foreach=foreach)


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Scale gradients down to the global norm `limit` (0: never); return the norm before that."""
    grads = [p.grad for p in parameters if p.grad is not None]
    foreach = _all_at_once(parameters)
    norm = torch.nn.utils.get_total_norm(grads, foreach=foreach)
    # Most updates are within the limit: no pass over memory to multiply by 1. Only on a CPU is
    # the norm known without waiting for the device.
    if limit and (norm.device.type != "cpu" or norm > limit):
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm, foreach=foreach)
    return norm


def _all_at_once(parameters: list[nn.Parameter]) -> bool | None:
    """Return torch's option `foreach`: its own choice is slow on a CPU."""
    return True if all(p.device.type == "cpu" for p in parameters) else None
