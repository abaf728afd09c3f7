"""Conversion of models: ``fold`` into plain layers, ``convert`` into normalised ones."""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from normrnn import norms
from normrnn.nn.base import Normalised
from normrnn.nn.batchnorm import Normaliser, collecting
from normrnn.nn.layers import GRU, LSTM, RNN
from normrnn.nn.options import NormName
from normrnn.nn.parameters import TORCH_OPTIONS, remade
from normrnn.nn.recalibrate import eval_mode, run_batches
from normrnn.ops.fold import fold_before

OURS: dict[type[nn.RNNBase], type[Normalised]] = {nn.RNN: RNN, nn.LSTM: LSTM, nn.GRU: GRU}


class Place(NamedTuple):
    """The place of a parameter: a module, its name there, and in the model."""

    module: nn.Module
    name: str
    full: str


Tie = list[Place]
"""The places of one parameter."""


def fold(model: nn.Module, plain: bool | None = None, *, before: bool = False) -> nn.Module:
    """Return a copy with plain layers of the same eval output; the model is unchanged.

    Hooks on the layers are not copied. Weights that are one parameter stay one where folding does
    not change them: W_h with norms of the input, never W_x.

    Args:
        plain: True requires ``torch.nn``'s layers, which take neither ``lengths=`` nor
            ``resets=`` nor peepholes. False keeps ours, with ``norm=None``. None keeps ours for a
            LiGRU, for learned initial states (with a warning), and where a layer has been called
            with ``lengths=`` or ``resets=`` that are not None, so that the copy can be called as
            the model was. Give False for a model that passes such arguments and has not been
            called yet.
        before: also fold a ``BatchNorm1d`` directly in front of a recurrent layer, torch's or
            ours, as in DeepSpeech: a child of the same module, right before the layer, alone or
            in a wrapper, of as many features as the layer's input. ``nn.Identity`` replaces it.

    >>> import torch
    >>> from normrnn import LSTM, recalibrate
    >>> model = nn.Sequential(LSTM(3, 4, norm="sequence"))
    >>> _ = recalibrate(model.eval(), [torch.randn(5, 8, 3)])
    >>> plain = fold(model)
    >>> type(plain[0]), torch.allclose(plain(x := torch.ones(5, 2, 3))[0], model(x)[0], atol=1e-5)
    (<class 'torch.nn.modules.rnn.LSTM'>, True)
    """
    for name, module in model.named_modules():
        if isinstance(module, Normalised):
            name = name or type(module).__name__
            module.check_foldable(name, keep=_keeps_ours(module, plain))
            if plain is None and module.learn_initial_state:
                warnings.warn(
                    f"{name} learns its initial state, which torch's layers do not: folded into "
                    f"normrnn's {module.mode} with norm=None",
                    stacklevel=2,
                )
            arguments = _extra_arguments(module)
            if plain and arguments:
                raise ValueError(
                    f"{name} cannot be folded into a torch.nn layer: it was called with "
                    f"{arguments}, which torch's do not take; plain=None or False keeps ours, with "
                    "norm=None"
                )

    def change(module: nn.Module) -> nn.Module | None:
        if not isinstance(module, Normalised):
            return None
        new = module.folded(_keeps_ours(module, plain))
        if isinstance(new, Normalised):  # it may be folded again
            new.takes_lengths, new.takes_resets = module.takes_lengths, module.takes_resets
        return new

    new, _ = copied(model, change)  # folding changes W_x, so that ties of it are lost
    return _fold_pairs(new) if before else new


def _extra_arguments(module: Normalised) -> str:
    """Return the arguments of past calls that torch's layers do not take."""
    arguments = {"lengths=": module.takes_lengths, "resets=": module.takes_resets}
    return " and ".join(name for name, yes in arguments.items() if yes)


def _keeps_ours(module: Normalised, plain: bool | None) -> bool:
    if plain is None:
        return bool(_extra_arguments(module) or module.needs_our_layer)
    return not plain


def convert(
    model: nn.Module,
    norm: NormName = "sequence",
    batches: Iterable[Any] | None = None,
    step: Callable[[nn.Module, Any], Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Return a copy in which every ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` is ours, normalised,
    with the same function.

    Frozen weights stay frozen, and weights that are one parameter stay one; hooks on the layers
    are not copied. The statistics of W_x x over ``batches`` give γ = √(σ² + ε) and β = μ + b: the
    normaliser undoes itself (the paper's remark in section 2), so eval outputs are the original
    ones, and on a batch with the same statistics so are those of training.

    Args:
        norm: ``"sequence"`` or ``"frame"``.
        batches, step: as for :func:`recalibrate`; the function is kept on these batches.
        options: options of the layers, as ``momentum=`` or ``eps=``.

    >>> import torch
    >>> plain, x = torch.nn.LSTM(3, 4), torch.randn(20, 6, 3)
    >>> ours = convert(plain, batches=[x]).eval()
    >>> torch.allclose(ours(x)[0], plain(x)[0], atol=1e-5)
    True
    """
    if norm not in _convertible() or options.get("time_steps") is not None:
        raise ValueError(
            f"convert keeps the function for norm={' or '.join(map(repr, _convertible()))} with "
            "statistics shared over time, "
            f"got norm={norm!r}, time_steps={options.get('time_steps')}"
        )
    for name, value in (("peephole", None), ("bias", True)):
        if options.get(name, value) is not value:
            raise ValueError(f"convert keeps the function, got {name}={options[name]!r}")
    check_options(options, "convert")
    if any(options.get("zoneout", ())):
        raise ValueError(f"convert keeps the function, got zoneout={options['zoneout']}")
    if options.get("affine") is False or options.get("track_running_stats") is False:
        raise ValueError("convert needs γ, β and running statistics to keep the function")
    if batches is None:
        raise ValueError("convert needs batches=, to keep the function of the model on them")
    new_layers: list[Normalised] = []

    def change(module: nn.Module) -> nn.Module | None:
        new = _converted(module, norm, options)
        new_layers.extend([] if new is None else [new])
        return new

    converted, lost = copied(model, change)
    check_ties(lost, "convert")
    normalisers = [  # not those of layers that were normalised before
        n for layer in new_layers for n in layer.normalisers() if isinstance(n, Normaliser)
    ]
    if not normalisers:
        raise ValueError("the model has no torch.nn.RNN, LSTM or GRU to convert")
    with eval_mode(converted), collecting(normalisers, use=False) as populations:
        run_batches(converted, batches, step)
    names = {module: name for name, module in converted.named_modules()}
    for normaliser, population in zip(normalisers, populations, strict=True):
        if not population.batches:
            where = names[normaliser].rpartition(".")[0]
            to = f" to reach {where}" if where else ""
            raise ValueError(f"convert needs at least one batch of finite values{to}, got none")
        normaliser.absorb(population)
    return converted


def check_options(options: Iterable[str], tool: str) -> None:
    """Raise ValueError for options that the layers have already."""
    if same := {*options} & {*TORCH_OPTIONS, "nonlinearity", "proj_size"}:
        raise ValueError(f"{tool} keeps the layers' own {min(same)}: change it in the model")


def check_ties(lost: Iterable[Tie], tool: str) -> None:
    """Raise ValueError for biases that several layers share; a layer's own two are one β."""
    for tie in lost:
        merged = {(place.module, place.name.partition("_l")[2]) for place in tie}
        if len(merged) > 1 or tie[0].module.mode == "GRU":  # β does not hold all of its bias_hh
            first, second = tie[0].full, tie[1].full
            raise ValueError(
                f"{first} and {second} are one parameter, and {tool} cannot keep that: each "
                "layer gets a β of its own; give each a bias of its own first"
            )


def _convertible() -> list[str]:
    """Return the norms of the input transition that are a linear map under given statistics."""
    rows = map(norms.get, norms.names())
    return [
        row.name
        for row in rows
        if row.acts == "input" and row.keeps_statistics and issubclass(row.load(), Normaliser)
    ]


def as_ours(layer: nn.RNNBase) -> Normalised:
    """Return our layer with ``norm=None`` and the weights of a torch.nn layer."""
    kind = next(ours for torchs, ours in OURS.items() if isinstance(layer, torchs))
    new = remade(layer, kind, layer.bias, norm=None)
    new.load_state_dict(layer.state_dict())
    return new


def _converted(module: nn.Module, norm: NormName, options: dict[str, Any]) -> Normalised | None:
    """Return our layer with torch's weights and a neutral normaliser."""
    ours = our_layer(module)
    if ours is None:
        return None
    new = remade(module, ours, norm=norm, **{"bias": True, **options})  # type: ignore[arg-type]
    new.take_weights(module)
    new.start_neutral()
    return new


def our_layer(module: nn.Module) -> type[Normalised] | None:
    """Return the class that replaces a plain recurrent layer; None for other modules.

    ValueError for subclasses of torch's layers, which may do something else.
    """
    if not isinstance(module, nn.RNNBase):
        return None
    ours: Any = OURS.get(type(module))
    if isinstance(module, Normalised):
        if module.norm is not None or module.peephole or any(module.zoneout):
            return None
        ours = type(module) if type(module) in OURS.values() else None
    if ours is None:
        raise ValueError(
            f"{type(module).__name__} is made from torch's layers and may add something to"
            " them: only nn.RNN, nn.LSTM and nn.GRU themselves, not parametrized, can be"
            " replaced by ours"
        )
    return ours


# A copy of a model in which layers are replaced, and weights that are one parameter stay one.


def _replace(
    module: nn.Module,
    change: Callable[[nn.Module], nn.Module | None],
    done: dict[nn.Module, nn.Module],
) -> nn.Module:
    """Replace a module or its children by ``change``; a module used twice stays one."""
    if module not in done:
        done[module] = change(module) or module
        if done[module] is module:
            for name, child in module._modules.items():
                if child is not None:
                    module._modules[name] = _replace(child, change, done)
    return done[module]


def copied(
    model: nn.Module, change: Callable[[nn.Module], nn.Module | None]
) -> tuple[nn.Module, list[Tie]]:
    """Return a copy in which ``change`` has replaced modules, and the ties that are lost."""
    copied_model = copy.deepcopy(model)
    tied, done = find_ties(copied_model), dict[nn.Module, nn.Module]()
    new = _replace(copied_model, change, done)
    return new, _keep_ties(tied, done)


def find_ties(model: nn.Module) -> dict[nn.Parameter, Tie]:
    """Return the parameters with more than one place; a module used twice is one place."""
    places: dict[nn.Parameter, Tie] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{path}.{name}" if path else name
                places.setdefault(parameter, []).append(Place(module, name, full))
    return {parameter: tie for parameter, tie in places.items() if len(tie) > 1}


def _keep_ties(tied: Mapping[nn.Parameter, Tie], done: Mapping[nn.Module, nn.Module]) -> list[Tie]:
    """Restore ties after a replacement, where the values are still the same.

    The original parameter replaces those of the new layers, since modules that were not replaced
    hold it too. ``done`` maps each module to its replacement. Returns the ties that are lost, in
    whole or in part.
    """
    return [tie for parameter, tie in tied.items() if not _keep_tie(parameter, tie, done)]


def _keep_tie(parameter: nn.Parameter, tie: Tie, done: Mapping[nn.Module, nn.Module]) -> bool:
    is_complete = True
    for module, name, _ in tie:
        new = done.get(module)
        value = None if new is None else new._parameters.get(name)
        if value is not None and torch.equal(value, parameter):
            setattr(new, name, parameter)
        else:
            is_complete = False
    return is_complete


# A BatchNorm1d in front of a recurrent layer, as in DeepSpeech, folded into its weights.

_BatchNorm = nn.BatchNorm1d | nn.SyncBatchNorm
_NEUTRAL = nn.Dropout | nn.Identity
"""Modules that do nothing in eval mode."""


def _fold_pairs(model: nn.Module) -> nn.Module:
    """Fold every pair of ``model``, in place; ValueError if there is none."""
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
    """Return parent and name of a layer, and the normalisation in front of it."""
    pairs = []
    for parent in model.modules():
        features, norm = 0, None
        for name, child in parent.named_children():
            if isinstance(child, _NEUTRAL):
                continue
            if isinstance(child, nn.RNNBase) and child.input_size == features:
                pairs.append((parent, name, norm))
            norm = _only_norm(child)
            features = 0 if norm is None else norm.num_features
    return pairs


def _only_norm(module: nn.Module) -> Any:
    """Return a normalisation, or the one that a module wraps and nothing else; else None."""
    leaves = [m for m in module.modules() if not any(True for _ in m.children())]
    return leaves[0] if len(leaves) == 1 and isinstance(leaves[0], _BatchNorm) else None


@torch.no_grad()
def _absorbed(layer: Any, norm: Any) -> nn.RNNBase:
    """Return the layer with the normalisation folded into its first weights, and with a bias."""
    if norm.running_mean is None:
        raise ValueError(
            "a BatchNorm1d without running statistics (track_running_stats=False) cannot be folded"
        )
    if not layer.bias:
        options = {"norm": layer.norm} if hasattr(layer, "norm") else {}
        options |= {"peephole": layer.peephole} if getattr(layer, "peephole", None) else {}
        new = remade(layer, type(layer), bias=True, **options)
        for name, value in list(new.named_parameters()):
            if not name.startswith("bias"):
                setattr(new, name, layer.get_parameter(name))  # it may be tied
            else:
                value.zero_()
        for name in ("takes_lengths", "takes_resets"):
            if hasattr(layer, name):
                setattr(new, name, getattr(layer, name))
        layer = new
    fixed = norm.running_mean, norm.running_var
    for end in ("", "_reverse")[: 1 + layer.bidirectional]:
        weight, bias = (layer.get_parameter(f"{name}_l0{end}") for name in ("weight_ih", "bias_ih"))
        scaled, shift = fold_before(weight, norm.weight, norm.bias, fixed, norm.eps)
        # New parameters: other layers may share the old ones.
        for name, old, value in (("weight_ih", weight, scaled), ("bias_ih", bias, bias + shift)):
            setattr(layer, f"{name}_l0{end}", nn.Parameter(value, old.requires_grad))
    return layer
