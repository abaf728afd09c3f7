"""Initialisation of the recurrent layers of a model, gate by gate, normalisers included."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normrnn.nn.normaliser import GateNorm

Init = Callable[[Tensor], Any]
_RECURRENT = nn.RNNBase | nn.RNNCellBase
_LSTMS = nn.LSTM, nn.LSTMCell


@torch.no_grad()
def initialise(
    model: nn.Module,
    *,
    input: Init = nn.init.xavier_uniform_,
    recurrent: Init = nn.init.orthogonal_,
    bias: float = 0.0,
    forget_bias: float | None = None,
) -> nn.Module:
    """Initialise every recurrent layer and cell of a model, torch's or ours.

    Replaces the usual loop over ``named_parameters()``, which fails on γ, a vector among weights,
    misses β, and treats the stacked (4H, I) as one matrix, so that Glorot's bound is too small.
    Parametrised weights are assigned to.

    Args:
        input, recurrent: functions as of ``torch.nn.init``, called on each gate's own (H, I) and
            (H, H); a projection is drawn by ``input``.
        bias: value of β in normalised layers, of the sum of torch's two biases in others. γ gets
            its initial value, peepholes 0; statistics are reset.
        forget_bias: the same for the LSTM's forget gates; None: the layer's own, if it has one.

    Returns:
        The model. ValueError where a parametrisation cannot be assigned to.

    >>> from normrnn.nn.layers import LSTM
    >>> layer = initialise(LSTM(3, 2, norm="sequence"), forget_bias=1.0)
    >>> layer.norm_l0.bias.tolist()
    [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    layers = [module for module in model.modules() if isinstance(module, _RECURRENT)]
    if not layers:
        raise ValueError("the model has no recurrent layer to initialise")
    for layer in layers:
        value = getattr(layer, "forget_bias", None) if forget_bias is None else forget_bias
        gate = None if value is None or not _is_lstm(layer) else (layer.hidden_size, value)
        fill = partial(_fill, bias=bias, gate=gate)
        for normaliser in layer.children():
            if isinstance(normaliser, GateNorm):
                _restart(normaliser, fill)
        for name in _names(layer):
            _draw(layer, name, _initialiser(layer, name, input, recurrent, fill))
    return model


def _is_lstm(layer: nn.Module) -> bool:
    return isinstance(layer, _LSTMS)


def _names(module: nn.Module) -> list[str]:
    """Return the names of its parameters, parametrised ones included."""
    plain = [name for name, _ in module.named_parameters(recurse=False)]
    parametrised: Any = module.parametrizations if parametrize.is_parametrized(module) else ()
    return [*plain, *parametrised]


def _initialiser(layer: Any, name: str, input: Init, recurrent: Init, fill: Init) -> Init:
    """Return the function that initialises the parameter of that name."""
    kind = name.partition("_l")[0]
    gate = input if kind == "weight_ih" else recurrent

    def draw(parameter: Tensor) -> None:
        if kind == "bias_ih":
            fill(parameter)
        elif parameter.dim() == 1:  # bias_hh, bias_hn, peepholes
            parameter.zero_()
        elif kind == "weight_hr":
            input(parameter)
        else:
            for block in parameter.split(layer.hidden_size):
                gate(block)

    return draw


def _restart(normaliser: GateNorm, fill: Init) -> None:
    """Reset a normaliser, parametrised vectors included, and set β."""
    normaliser.reset_parameters()
    for name in _names(normaliser):
        if name == "bias":
            _draw(normaliser, name, fill)
        elif parametrize.is_parametrized(normaliser, name):
            start = 0.0 if name.startswith("bias") else normaliser.gamma
            _draw(normaliser, name, partial(nn.init.constant_, val=start))


def _draw(module: Any, name: str, init: Init) -> None:
    """Initialise in place, or by assignment where the parameter is parametrised."""
    if not parametrize.is_parametrized(module, name):
        init(module.get_parameter(name))
        return
    value = getattr(module, name).clone(memory_format=torch.contiguous_format)
    init(value)
    where = f"{name} of {parametrize.type_before_parametrizations(module).__name__}"
    try:
        setattr(module, name, value.clone())
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where} cannot be initialised, its parametrisation cannot be assigned to ({error}): "
            "initialise first, parametrise then"
        ) from error


def _fill(vector: Tensor, bias: float, gate: tuple[int, float] | None) -> None:
    vector.fill_(bias)
    if gate is not None:
        size, value = gate
        vector[size : 2 * size] = value
