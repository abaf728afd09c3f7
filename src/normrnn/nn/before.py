"""A ``BatchNorm1d`` in front of a recurrent layer, DeepSpeech's form, folded into its weights."""

from typing import Any

import torch
from torch import nn

from normrnn.nn.parameters import remade
from normrnn.ops.fold import fold_before as fold_weights

_Norm = nn.BatchNorm1d | nn.SyncBatchNorm
_PASSES = nn.Dropout | nn.Identity
"""What stands between without doing anything in eval mode."""


def fold_before(model: nn.Module) -> nn.Module:
    """Folds every pair of ``model``, in place; ValueError if there is none."""
    pairs = _pairs(model)
    if not pairs:
        raise ValueError(
            "before=True found no BatchNorm1d directly in front of a recurrent layer: the two have "
            "to be neighbouring children of one module, of equal sizes"
        )
    places: dict[nn.Module, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        places[module] = places.get(module, 0) + 1
    for parent, name, norm in pairs:
        layer: Any = parent._modules[name]
        for module in (norm, layer):
            if places[module] > 1:
                raise ValueError(
                    f"{type(module).__name__} is used in more than one place: folding one into the "
                    "other would change it everywhere"
                )
        parent._modules[name] = _absorbed(layer, norm)
    folded = {norm for _, _, norm in pairs}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child in folded:
                module._modules[name] = nn.Identity()
    return model


def _pairs(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Parent and name of a layer, and the normalisation in front of it."""
    found = []
    for parent in model.modules():
        features, norm = 0, None
        for name, child in parent.named_children():
            if isinstance(child, _PASSES):
                continue
            if isinstance(child, nn.RNNBase) and child.input_size == features:
                found.append((parent, name, norm))
            norm = _only_norm(child)
            features = 0 if norm is None else norm.num_features
    return found


def _only_norm(module: nn.Module) -> Any:
    """The module if it is a normalisation, or the one that it wraps and nothing else."""
    leaves = [m for m in module.modules() if not any(True for _ in m.children())]
    return leaves[0] if len(leaves) == 1 and isinstance(leaves[0], _Norm) else None


@torch.no_grad()
def _absorbed(layer: Any, norm: Any) -> nn.RNNBase:
    """The layer with the map of the normalisation in its first weights, and so with a bias."""
    if norm.running_mean is None:
        raise ValueError(
            "a BatchNorm1d without running statistics (track_running_stats=False) cannot be folded"
        )
    if not layer.bias:
        own = {"norm": layer.norm} if hasattr(layer, "norm") else {}
        own |= {"peephole": layer.peephole} if getattr(layer, "peephole", None) else {}
        new = remade(layer, type(layer), bias=True, **own)
        for name, value in list(new.named_parameters()):
            if not name.startswith("bias"):
                setattr(new, name, layer.get_parameter(name))  # that of a tie, perhaps
            else:
                value.zero_()
        for name in ("takes_lengths", "takes_resets"):
            if hasattr(layer, name):
                setattr(new, name, getattr(layer, name))
        layer = new
    fixed = norm.running_mean, norm.running_var
    for end in ("", "_reverse")[: 1 + layer.bidirectional]:
        weight, bias = (layer.get_parameter(f"{name}_l0{end}") for name in ("weight_ih", "bias_ih"))
        scaled, shift = fold_weights(weight, norm.weight, norm.bias, fixed, norm.eps)
        # Others that share them keep what they had.
        for name, old, value in (("weight_ih", weight, scaled), ("bias_ih", bias, bias + shift)):
            setattr(layer, f"{name}_l0{end}", nn.Parameter(value, old.requires_grad))
    return layer
