"""Weights that are one parameter in several places stay one when layers take others' places."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn


class Place(NamedTuple):
    """Where a parameter is: a module, its name there, and in the model."""

    module: nn.Module
    name: str
    full: str


Tie = list[Place]
"""The places of one parameter."""


def ties(model: nn.Module) -> dict[nn.Parameter, Tie]:
    """The parameters of more than one place; a module that is used twice is one place."""
    found: dict[nn.Parameter, Tie] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{path}.{name}" if path else name
                found.setdefault(parameter, []).append(Place(module, name, full))
    return {parameter: tie for parameter, tie in found.items() if len(tie) > 1}


def keep(tied: Mapping[nn.Parameter, Tie], done: Mapping[nn.Module, nn.Module]) -> list[Tie]:
    """Ties what has been replaced as it was tied before, where the values are still the same.

    Layers are made with parameters of their own, so the one that was there before takes their
    place: it is also what modules hold that were not replaced. ``done`` is what has become of each
    module. Returns the ties that are lost, in whole or in part.
    """
    return [tie for parameter, tie in tied.items() if not _keep(parameter, tie, done)]


def _keep(parameter: nn.Parameter, tie: Tie, done: Mapping[nn.Module, nn.Module]) -> bool:
    whole = True
    for module, name, _ in tie:
        new = done.get(module)
        value = None if new is None else new._parameters.get(name)
        if value is not None and torch.equal(value, parameter):
            setattr(new, name, parameter)
        else:
            whole = False
    return whole
