"""Backward passes that cannot be differentiated themselves, and say so."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Grads = tuple[Tensor | None, ...]


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:  # noqa: ARG004
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        raise RuntimeError(
            "trying to differentiate twice through a normalised recurrence, which has no second"
            ' derivative (norm="hidden" has)'
        )


def once_differentiable(backward: Callable[..., Grads]) -> Callable[..., Grads]:
    """As torch's, which overlooks one thing: a gradient depends on the saved tensors even where
    the one that comes in is a constant, as that of a sum is. Not refused, the second derivative
    would lack that part in silence."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None) -> Grads:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        # Tied to what it depends on, so that whoever asks for that meets the refusal.
        sources = [t for t in (*ctx.saved_tensors, *grads) if t is not None and t.requires_grad]

        def refusing(grad: Tensor | None) -> Tensor | None:
            return grad if grad is None else _Refuse.apply(grad.detach().requires_grad_(), *sources)  # type: ignore

        return tuple(map(refusing, found))

    return wrapper
