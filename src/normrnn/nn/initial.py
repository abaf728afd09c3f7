"""How the recurrent layers of a model begin: gate by gate, normalisers included."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normrnn.nn.normaliser import GateNorm

Init = Callable[[Tensor], Any]
_RECURRENT = nn.RNNBase | nn.RNNCellBase


@torch.no_grad()
def initialise(
    model: nn.Module,
    *,
    input: Init = nn.init.xavier_uniform_,
    recurrent: Init = nn.init.orthogonal_,
    bias: float = 0.0,
    forget_bias: float | None = None,
) -> nn.Module:
    """Draws the weights of every recurrent layer and cell of a model anew, torch's or ours.

    For the usual loop over ``named_parameters()``, which raises on γ, a vector among weights, or
    finds no bias where β is it; and which takes the stacked (4H, I) for one matrix, so that
    Glorot's bound is too small.

    Args:
        input, recurrent: functions as of ``torch.nn.init``, called on each gate's own (H, I) and
            (H, H); a projection is drawn by ``input``.
        bias: what every bias is, β of a normalised layer, the sum of torch's two of others. γ
            gets its initial value, peepholes 0; statistics are forgotten.
        forget_bias: the same of the LSTM's forget gates; None: the layer's own, if it has one.

    Returns:
        The model.

    >>> from normrnn.nn.layers import LSTM
    >>> layer = initialise(LSTM(3, 2), forget_bias=1.0)
    >>> layer.norm_l0.bias.tolist()
    [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    layers = [module for module in model.modules() if isinstance(module, _RECURRENT)]
    if not layers:
        raise ValueError("the model has no recurrent layer to initialise")
    for layer in layers:
        value = getattr(layer, "forget_bias", None) if forget_bias is None else forget_bias
        gate = None if value is None or not _is_lstm(layer) else (layer.hidden_size, value)
        for normaliser in layer.children():
            if isinstance(normaliser, GateNorm):
                normaliser.reset_parameters()
                _fill(normaliser.bias, bias, gate)
        for name, parameter in layer.named_parameters(recurse=False):
            kind = name.partition("_l")[0]
            if kind == "bias_ih":
                _fill(parameter, bias, gate)
            elif parameter.dim() == 1:  # bias_hh, bias_hn, peepholes
                parameter.zero_()
            elif kind == "weight_hr":
                input(parameter)
            else:
                for block in parameter.split(layer.hidden_size):
                    (input if kind == "weight_ih" else recurrent)(block)
    return model


def _is_lstm(layer: nn.Module) -> bool:
    return isinstance(layer, nn.LSTM | nn.LSTMCell)


def _fill(vector: Any, bias: float, gate: tuple[int, float] | None) -> None:
    if vector is not None:
        vector.fill_(bias)
        if gate is not None:
            size, value = gate
            vector[size : 2 * size] = value
