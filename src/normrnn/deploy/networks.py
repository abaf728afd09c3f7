"""Networks as functions of tensors, and copies of models whose recurrent layers are replaced."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from normrnn.nn.base import Normalised
from normrnn.nn.convert import as_ours


@dataclass
class Exportable:
    """A network as a function of tensors, and what its exports contain besides."""

    network: nn.Module
    example: tuple[Any, ...] | None = None  # arguments to trace `network` with
    dynamic: Any = None  # names of the axes that may change, by argument
    outputs: tuple[str, ...] = ("output",)
    notes: Mapping[str, str] = field(default_factory=dict)
    """JSON that a user needs beside the numbers, as the vocabulary."""
    usage: str = ""
    """Code for the card that calls the children of `network`, where these are torch's modules."""


def recurrent(model: nn.Module) -> dict[str, nn.RNNBase]:
    """Return the recurrent layers under all of their names."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, nn.RNNBase)}


def with_layers(model: nn.Module, change: Callable[[nn.RNNBase, str], nn.Module]) -> Any:
    """Return a copy in eval mode in which `change` replaced each recurrent layer."""
    layers = {id(layer): (layer, name) for name, layer in recurrent(model).items()}
    replaced = {key: change(old, name or type(old).__name__) for key, (old, name) in layers.items()}
    return copy.deepcopy(model, replaced).eval().requires_grad_(False)


def folded(layer: nn.RNNBase, name: str, keep: bool) -> nn.RNNBase:
    """Return the layer without normalisation; `keep`: as one of ours, with norm=None.

    Raise ValueError with the reason, and what to do instead, if the layer does not fold.
    """
    if not isinstance(layer, Normalised):
        return as_ours(layer) if keep else copy.deepcopy(layer)
    try:
        layer.check_foldable(name, keep=keep)
    except ValueError as error:
        raise ValueError(f"{error}; the formats onnx and program need no folding") from None
    return layer.folded(keep=keep)
