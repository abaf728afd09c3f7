"""Replace torch's layers by ours: in a model, or while a library builds one."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from threading import Lock
from typing import Any

from torch import nn

from normrnn.nn.base import Normalised
from normrnn.nn.convert import OURS, check_options, check_ties, copied, our_layer
from normrnn.nn.options import NormName
from normrnn.nn.parameters import remade

_Replaced = tuple[dict[str, Any], list[Normalised]]
_current: ContextVar[_Replaced | None] = ContextVar("normrnn_replacing", default=None)
"""Options of the layers, and those made so far."""
_lock, _active = Lock(), 0
_inits: dict[type[nn.RNNBase], Any] = {}


def replace(model: nn.Module, norm: NormName, **options: Any) -> nn.Module:
    """Return a copy in which every ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` is ours, to be trained.

    Weights keep their values, and those that are one parameter stay one; β starts as the sum of
    torch's two biases. A norm changes the function: for a trained model use :func:`convert`.
    Hooks on the layers are not copied, and cells are not replaced.

    Args:
        norm: any, as for :class:`LSTM`.
        options: options of the layers, as ``momentum=`` or ``time_steps=``.

    Raises:
        ValueError: if the model has no such layer, or one of a class derived from them.

    >>> import torch
    >>> model = nn.Sequential(nn.LSTM(3, 4))
    >>> replace(model, "frame")[0]
    LSTM(
      3, 4, norm='frame'
      (norm_l0): Normaliser(16, per step, eps=1e-05, momentum=0.1)
    )
    """
    check_options(options, "replace")
    new_layers: list[Normalised] = []

    def change(module: nn.Module) -> nn.Module | None:
        ours = our_layer(module)
        if ours is None:
            return None
        new = remade(module, ours, norm=norm, **{"bias": module.bias, **options})  # type: ignore[arg-type]
        new.take_weights(module)
        new.open_forget_gates()
        new_layers.append(new)
        return new

    new, lost = copied(model, change)
    if not new_layers:
        raise ValueError("the model has no torch.nn.RNN, LSTM or GRU to replace")
    check_ties(lost, "replace")
    return new


@contextmanager
def replacing(norm: NormName, **options: Any) -> Iterator[list[Normalised]]:
    """Make every ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` that is built inside one of ours.

    For libraries that build their own layers. The classes stay torch's: ``isinstance`` and derived
    classes work as before. Other threads and asynchronous tasks are not affected.

    Args:
        norm: any, as for :class:`LSTM`.
        options: options of the layers, as ``momentum=`` or ``time_steps=``.

    Returns:
        The list of the layers made so far; a warning at the end if there are none.

    >>> import torch
    >>> with replacing("layer"):
    ...     model = torch.nn.Sequential(torch.nn.GRU(3, 4))
    >>> model[0].norm
    'layer'
    """
    new_layers: list[Normalised] = []
    token = _current.set(({"norm": norm, **options}, new_layers))
    _install()
    try:
        yield new_layers
    finally:
        _uninstall()
        _current.reset(token)
    if not new_layers:
        warnings.warn(
            "no torch.nn.RNN, LSTM or GRU was built inside replacing(): classes derived from them"
            " and cells are not replaced",
            stacklevel=3,
        )


def _install() -> None:
    global _active
    with _lock:
        _active += 1
        if _active == 1:
            for kind, ours in OURS.items():
                _inits[kind] = kind.__init__
                kind.__init__ = _init(kind, ours)


def _uninstall() -> None:
    global _active
    with _lock:
        _active -= 1
        if _active == 0:
            for kind, init in _inits.items():
                kind.__init__ = init


def _init(kind: type[nn.RNNBase], ours: type[Normalised]) -> Callable[..., None]:
    """Return torch's ``__init__``, which inside :func:`replacing` makes a new layer ours."""
    init: Any = kind.__init__

    @wraps(init)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> None:
        current = _current.get()
        if current is None or type(self) is not kind:
            init(self, *args, **kwargs)
            return
        options, new_layers = current
        new: Any = self
        new.__class__ = ours
        new.__init__(*args, **{**kwargs, **options})
        new_layers.append(new)

    return replaced
