"""The choice of a backend, which a user may override."""

from threading import local
from typing import Any, Literal, get_args

Backend = Literal["auto", "native", "torch", "loop"]


class _Choice(local):
    """The backend of the current thread."""

    selected: str = "auto"


choice = _Choice()


class backend:  # noqa: N801  used as a function
    """Select what computes the recurrence, from now on or inside a ``with`` block.

    The choice is that of the current thread, as with ``torch.set_grad_enabled``.

    Args:
        name: ``"auto"`` chooses per call by a fixed rule (see ARCHITECTURE.md). ``"native"``: the
            compiled kernels. ``"torch"``: torch's own kernels, where the normalisation is a change
            of weights. ``"loop"``: a loop over time in torch's operations. A call that the chosen
            backend cannot compute raises RuntimeError.

    >>> import torch, normrnn
    >>> layer, x = normrnn.LSTM(3, 4, norm="frame"), torch.randn(5, 2, 3)
    >>> with backend("loop"):
    ...     output, _ = layer(x)
    """

    def __init__(self, name: Backend):
        if name not in get_args(Backend):
            choices = ", ".join(map(repr, get_args(Backend)))
            raise ValueError(f"unknown backend {name!r}: choose one of {choices}")
        self._name, self._before = name, choice.selected
        choice.selected = name

    def __enter__(self) -> None:
        choice.selected = self._name

    def __exit__(self, *_: Any) -> None:
        choice.selected = self._before


def check_backend(is_native: bool) -> None:
    """Raise RuntimeError if the recurrence, by the kernels or by the loop, is not what was chosen.

    A compiled graph finds that out when it runs.
    """
    if choice.selected == "torch":
        raise RuntimeError(
            "backend('torch') cannot run this call, or a graph that was traced with another "
            "backend: use 'auto'"
        )
    if choice.selected == "native" and not is_native:
        raise RuntimeError(
            "backend('native') cannot run this call: the compiled kernels take float32 on a CPU, "
            "without a projection, outside forward-mode differentiation, torch.func and torch.jit"
        )
