"""The choice of a backend, which a user may override."""

from threading import local
from typing import Any, Literal, get_args

Backend = Literal["auto", "native", "torch", "loop", "triton"]


class _Choice(local):
    """The backend of the current thread."""

    selected: str = "auto"


choice = _Choice()


class backend:  # noqa: N801  used as a function
    """Select what computes the recurrence, from now on or inside a ``with`` block.

    The choice is that of the current thread, as with ``torch.set_grad_enabled``.

    Args:
        name: ``"auto"`` chooses per call by a fixed rule (see ARCHITECTURE.md). ``"native"``: the
            compiled kernels. ``"torch"``: torch's own fused kernels, which can run every
            normalisation of W_x x.
            ``"loop"``: a loop over time in torch's operations. ``"triton"``: the Triton kernel of
            ``norm="layer"`` on LSTM. A call that the chosen backend cannot compute raises
            RuntimeError.

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
