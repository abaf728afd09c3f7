"""What is done to a whole model: recalibrate, batch_statistics, fold, convert."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from normrnn import norms
from normrnn.nn.base import Normalised
from normrnn.nn.batchnorm import Normaliser
from normrnn.nn.before import fold_before
from normrnn.nn.layers import GRU, LSTM, RNN
from normrnn.nn.options import Norm
from normrnn.nn.normaliser import BATCH, StatisticalNorm, collecting, requesting
from normrnn.nn.parameters import TORCH_OPTIONS, remade
from normrnn.nn.ties import Tie, keep, ties

OURS: dict[type[nn.RNNBase], type[Normalised]] = {nn.RNN: RNN, nn.LSTM: LSTM, nn.GRU: GRU}


class NothingFinite(ValueError):  # noqa: N818  what was found
    """No batch had statistics that are numbers."""


def _normalisers(model: nn.Module) -> list[StatisticalNorm]:
    return [module for module in model.modules() if isinstance(module, StatisticalNorm)]


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Tensor | PackedSequence):
        model(batch)
    elif isinstance(batch, dict):
        with _hint():
            model(**batch)
    elif isinstance(batch, tuple | list):
        _call_with(model, batch)
    else:
        raise ValueError(
            f"a batch is a tensor, a PackedSequence, a tuple, a list or a dict, "
            f"got {type(batch).__name__}; for anything else give step=, a function of the model "
            "and the batch"
        )


_STEP = "give step=, for (x, y) batches step=lambda model, batch: model(batch[0])"


def _call_with(model: nn.Module, batch: Sequence[Any]) -> None:
    """Call a model with the entries of a tuple or list that its ``forward`` takes by position.

    Of (x, y) a model of one argument gets x. Whether an optional argument is meant, as ``hx``, only
    a tuple tells; a list is what a DataLoader makes of any pair.
    """
    required, most = _positional(model)
    if isinstance(batch, list) and len(batch) != required and required != most:
        raise ValueError(
            f"a batch is a list of {len(batch)}, and which of it {type(model).__name__}.forward "
            f"takes is not clear: {_STEP}; or make it a tuple of the arguments"
        )
    entries = batch if most is None else batch[:most]
    if most is not None and required != most:
        entries = batch  # too many are an error: they may be arguments
    with _hint():
        model(*entries)


@contextmanager
def _hint() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"recalibrate and convert call the model with the batch's entries: {_STEP}")
        raise


def _positional(model: nn.Module) -> tuple[int, int | None]:
    """How many positional arguments ``forward`` needs, and takes; None: any number."""
    inner: Any = getattr(model, "_orig_mod", model)  # of torch.compile
    parameters = list(inspect.signature(inner.forward).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):  # of wrappers, as DDP or AveragedModel
        wrapped = getattr(inner, "module", None)
        return _positional(wrapped) if isinstance(wrapped, nn.Module) else (0, None)
    own = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in own), len(own)


def _run(
    model: nn.Module, batches: Iterable[Any], step: Callable[[nn.Module, Any], Any] | None
) -> int:
    if isinstance(batches, Tensor | PackedSequence):
        raise ValueError(
            f"batches is one {type(batches).__name__}: give a list of them, [x] for a single one"
        )
    count = 0
    with torch.no_grad():
        for batch in batches:
            (step or _call)(model, batch)
            count += 1
    return count


@contextmanager
def _eval(model: nn.Module) -> Iterator[None]:
    modes = [(module, True) for module in model.modules() if module.training]
    if modes:  # a model that serves in eval mode is not touched
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def recalibrate(
    model: nn.Module,
    batches: Iterable[Any],
    step: Callable[[nn.Module, Any], Any] | None = None,
    *,
    shared: bool = False,
) -> nn.Module:
    """Replaces running statistics by population statistics from one pass over ``batches``.

    Dropout is off and every normaliser uses the batch's statistics, pooled by row count. With
    dropout in training this is not a luxury: the variance of W_x x under dropout p is about
    1/(1 − p) times the one at test time.

    Args:
        batches: each the input (tensor or PackedSequence), a tuple of ``*args`` or a dict of
            ``**kwargs``. Of tuples and lists, as the (x, y) of a DataLoader, a model without
            optional arguments gets as many entries as it takes: x alone if it takes one.
        step: called as ``step(model, batch)`` instead, to carry a state from batch to batch, or to
            choose what the model gets.
        shared: make one of the statistics that layers with ``time_steps`` keep for every step,
            over the rows of all steps. Such layers have no ``time_steps`` afterwards, and fold.

    Returns:
        The model, its modes as they were.

    Warns:
        UserWarning: if the model has no statistics to recalibrate, and if those of its time steps
            differ strongly where one set is kept for all (see ``time_steps``).

    >>> import torch
    >>> layer = LSTM(3, 4, norm="sequence")
    >>> data = torch.randn(20, 6, 3)
    >>> pre = data.view(-1, 3) @ layer.weight_ih_l0.t()
    >>> _ = recalibrate(layer, data.split(4))
    >>> torch.allclose(layer.norm_l0.running_mean, pre.mean(0), atol=1e-6)
    True
    """
    normalisers = _normalisers(model)
    if not normalisers:
        warnings.warn(
            f"recalibrate: {type(model).__name__} has no normalisation that keeps statistics, so "
            "there is nothing to do",
            stacklevel=2,
        )
        return model
    with _eval(model), collecting(normalisers, shared=shared) as populations:
        count = _run(model, batches, step)
    if not count:
        raise ValueError("recalibrate needs at least one batch, got none")
    if not any(population.batches for population in populations):
        raise NothingFinite("recalibrate needs at least one batch of finite values, got none")
    _warn_of_steps(model, dict(zip(normalisers, populations, strict=True)))
    for normaliser, population in zip(normalisers, populations, strict=True):
        if shared and normaliser.time_steps is not None and population.batches:
            if not bool(population.enough.all()):
                raise ValueError("statistics shared over time need more than one row, got 1")
            normaliser.share()
        normaliser.adopt(population)
    for module in model.modules():
        if isinstance(module, Normalised) and module.time_steps is not None:
            steps = [n.time_steps for n in _normalisers(module)]
            module.time_steps = max((k for k in steps if k is not None), default=None)
    return model


STEPS_DIFFER = 0.25
"""Above this mean square change of normalised rows, half a standard deviation, steps differ."""


def _warn_of_steps(model: nn.Module, populations: Mapping[nn.Module, Any]) -> None:
    """One warning if time steps differ strongly in a layer that keeps one set for all of them."""
    for name, module in model.named_modules():
        difference = getattr(populations.get(module), "step_difference", 0.0)
        if difference > STEPS_DIFFER:
            warnings.warn(
                f"{name}: statistics of time steps differ strongly (by {difference**0.5:.1f} "
                "standard deviations), and one set is kept for all, so eval differs from training:"
                " consider time_steps=, or norm='sequence' or 'layer'",
                stacklevel=3,
            )
            return


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[nn.Module]:
    """Eval mode, but every normaliser uses the batch's own statistics; nothing is updated.

    >>> import torch
    >>> layer, x = LSTM(3, 4, norm="sequence").eval(), torch.randn(20, 6, 3) * 5 + 2
    >>> with batch_statistics(layer):
    ...     own = layer(x)[0]
    >>> torch.allclose(own, layer(x)[0]), torch.allclose(own, layer.train()(x)[0])
    (False, True)
    """
    with _eval(model), requesting(dict.fromkeys(_normalisers(model), BATCH)):
        yield model


def _replace(
    module: nn.Module,
    change: Callable[[nn.Module], nn.Module | None],
    done: dict[nn.Module, nn.Module],
) -> nn.Module:
    """The module, or what ``change`` makes of it; one used in two places stays one."""
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
    """A copy in which ``change`` has replaced modules, and the ties of weights that are lost."""
    own = copy.deepcopy(model)
    tied, done = ties(own), dict[nn.Module, nn.Module]()
    new = _replace(own, change, done)
    return new, keep(tied, done)


def fold(model: nn.Module, plain: bool | None = None, *, before: bool = False) -> nn.Module:
    """A copy with plain layers of the same eval output; the model is unchanged.

    Hooks on the layers themselves are not taken along. Weights that are one parameter stay one
    where folding leaves them as they are: W_h of the norms of the input, and no W_x.

    Args:
        plain: True insists on ``torch.nn``'s layers, which know neither ``lengths=`` nor
            ``resets=`` nor peepholes. False keeps ours, with ``norm=None``. None keeps ours where
            this process has seen a call with ``lengths=`` or ``resets=``, be they None, so that
            the copy can be called as the model was. A model that was loaded and not called yet
            has seen nothing: False, if it hands on such arguments.
        before: also a ``BatchNorm1d`` directly in front of a recurrent layer, torch's or ours, as
            in DeepSpeech: a child of the same module, right before the layer, alone or in a
            wrapper, of as many features as the layer's input. Its place is taken by
            ``nn.Identity``.

    >>> import torch
    >>> model = nn.Sequential(LSTM(3, 4, norm="sequence"))
    >>> _ = recalibrate(model.eval(), [torch.randn(5, 8, 3)])
    >>> plain = fold(model)
    >>> type(plain[0]), torch.allclose(plain(x := torch.randn(5, 2, 3))[0], model(x)[0])
    (<class 'torch.nn.modules.rnn.LSTM'>, True)
    """
    for name, module in model.named_modules():
        if isinstance(module, Normalised):
            name = name or type(module).__name__
            module.check_foldable(name, keep=_kept(module, plain))
            seen = _beyond_torch(module)
            if plain and seen:
                raise ValueError(
                    f"{name} cannot be folded into a torch.nn layer: it was called with {seen}, "
                    "which torch's do not take; plain=None or False keeps ours, with norm=None"
                )

    def change(module: nn.Module) -> nn.Module | None:
        if not isinstance(module, Normalised):
            return None
        new = module.folded(_kept(module, plain))
        if isinstance(new, Normalised):  # to be folded again, perhaps
            new.takes_lengths, new.takes_resets = module.takes_lengths, module.takes_resets
        return new

    new, _ = copied(model, change)  # W_x that were one have each its own statistics in them now
    return fold_before(new) if before else new


def _beyond_torch(module: Normalised) -> str:
    """The arguments that this process has seen and torch's layers do not have."""
    seen = {"lengths=": module.takes_lengths, "resets=": module.takes_resets}
    return " and ".join(name for name, yes in seen.items() if yes)


def _kept(module: Normalised, plain: bool | None) -> bool:
    return bool(_beyond_torch(module)) if plain is None else not plain


def convert(
    model: nn.Module,
    norm: Norm = "sequence",
    batches: Iterable[Any] | None = None,
    step: Callable[[nn.Module, Any], Any] | None = None,
    **options: Any,
) -> nn.Module:
    """A copy in which every ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` is ours, the function kept.

    Which weights are trained stays as it is, and so does which are one parameter; hooks on the
    layers themselves are not taken along. The statistics of W_x x over ``batches`` give
    γ = √(σ² + ε) and β = μ + b: the normaliser undoes itself (the paper's remark in section 2), so
    eval outputs are the original ones, and on a batch with the same statistics so are those of
    training.

    Args:
        norm: ``"sequence"`` or ``"frame"``.
        batches, step: as for :func:`recalibrate`; the batches to keep the function on.
        options: of the layers, as ``momentum=`` or ``eps=``.

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
    made: list[Normalised] = []

    def change(module: nn.Module) -> nn.Module | None:
        new = _converted(module, norm, options)
        made.extend([] if new is None else [new])
        return new

    converted, lost = copied(model, change)
    check_ties(lost, "convert")
    normalisers = [  # not those there before
        n for layer in made for n in layer.normalisers() if isinstance(n, Normaliser)
    ]
    if not normalisers:
        raise ValueError("the model has no torch.nn.RNN, LSTM or GRU to convert")
    with _eval(converted), collecting(normalisers, use=False) as populations:
        _run(converted, batches, step)
    names = {module: name for name, module in converted.named_modules()}
    for normaliser, population in zip(normalisers, populations, strict=True):
        if not population.batches:
            where = names[normaliser].rpartition(".")[0]
            to = f" to reach {where}" if where else ""
            raise ValueError(f"convert needs at least one batch of finite values{to}, got none")
        normaliser.absorb(population)
    return converted


def check_options(options: Iterable[str], tool: str) -> None:
    """ValueError for options that the layers have already."""
    if same := {*options} & {*TORCH_OPTIONS, "nonlinearity", "proj_size"}:
        raise ValueError(f"{tool} keeps the layers' own {min(same)}: change it in the model")


def check_ties(lost: Iterable[Tie], tool: str) -> None:
    """ValueError for biases that several layers share; a layer's own two are one β."""
    for tie in lost:
        merged = {(place.module, place.name.partition("_l")[2]) for place in tie}
        if len(merged) > 1 or tie[0].module.mode == "GRU":  # whose bias_hh is not all in β
            first, second = tie[0].full, tie[1].full
            raise ValueError(
                f"{first} and {second} are one parameter, and {tool} cannot keep that: each "
                "layer gets a β of its own; give each a bias of its own first"
            )


def _convertible() -> list[str]:
    """Norms of the input transition that are a linear map under given statistics."""
    rows = map(norms.of, norms.names())
    return [
        row.name
        for row in rows
        if row.acts == "input" and row.keeps_statistics and issubclass(row.load(), Normaliser)
    ]


def as_ours(layer: nn.RNNBase) -> Normalised:
    """Our layer with ``norm=None`` and the weights of a torch.nn layer."""
    kind = next(ours for torchs, ours in OURS.items() if isinstance(layer, torchs))
    new = remade(layer, kind, layer.bias, norm=None)
    new.load_state_dict(layer.state_dict())
    return new


def _converted(module: nn.Module, norm: Norm, options: dict[str, Any]) -> Normalised | None:
    """Our layer with torch's weights and a normaliser that does nothing yet."""
    ours = our_layer(module)
    if ours is None:
        return None
    new = remade(module, ours, norm=norm, **{"bias": True, **options})  # type: ignore[arg-type]
    new.take_weights(module)
    new.start_neutral()
    return new


def our_layer(module: nn.Module) -> type[Normalised] | None:
    """The class that takes the place of a plain recurrent layer; None for other modules.

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
