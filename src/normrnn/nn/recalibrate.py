"""Statistics for test time: ``recalibrate`` and ``batch_statistics``."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from normrnn.nn.base import Normalised
from normrnn.nn.batchnorm import StatisticalNorm, collecting, requesting
from normrnn.nn.normaliser import BATCH

STEPS_DIFFER = 0.25
"""Above this mean square change of normalised rows, half a standard deviation, steps differ."""


class NothingFinite(ValueError):  # noqa: N818
    """No batch had finite statistics."""


def _normalisers(model: nn.Module) -> list[StatisticalNorm]:
    return [module for module in model.modules() if isinstance(module, StatisticalNorm)]


def recalibrate(
    model: nn.Module,
    batches: Iterable[Any],
    step: Callable[[nn.Module, Any], Any] | None = None,
    *,
    shared: bool = False,
) -> nn.Module:
    """Replace running statistics by population statistics from one pass over ``batches``.

    Dropout is off and every normaliser uses the batch's statistics, pooled by row count; a time
    step whose rows of W_x x are all equal uses those of the batches so far. After
    training with dropout p it is needed: the variance of W_x x was about 1/(1 − p) times that of
    test time.

    Args:
        batches: each the input (tensor or PackedSequence), a tuple of ``*args`` or a dict of
            ``**kwargs``. Of tuples and lists, as the (x, y) of a DataLoader, a model without
            optional arguments gets as many entries as it takes: x alone if it takes one.
        step: called as ``step(model, batch)`` instead, to carry a state from batch to batch, or to
            choose what the model gets.
        shared: merge the statistics that layers with ``time_steps`` keep for every step, over the
            rows of all steps. Such layers have no ``time_steps`` afterwards, and can be folded.

    Returns:
        The model, its modes as they were.

    Warns:
        UserWarning: if the model has no statistics to recalibrate, and if those of its time steps
            differ strongly where one set is kept for all (see ``time_steps``).

    >>> import torch
    >>> from normrnn import LSTM
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
    with eval_mode(model), collecting(normalisers, shared=shared) as populations:
        count = run_batches(model, batches, step)
    if not count:
        raise ValueError("recalibrate needs at least one batch, got none")
    if not any(population.batches for population in populations):
        raise NothingFinite("recalibrate needs at least one batch of finite values, got none")
    _warn_if_steps_differ(model, dict(zip(normalisers, populations, strict=True)))
    pairs = list(zip(normalisers, populations, strict=True))
    merged = [(n, p) for n, p in pairs if shared and n.time_steps is not None and p.batches]
    names = {module: name for name, module in model.named_modules()}
    for normaliser, population in merged:
        if not bool(population.enough().all()):
            raise ValueError(
                f"{names[normaliser]}: statistics shared over time need rows that differ, got a "
                "single row, or equal ones"
            )
    for normaliser, _ in merged:
        normaliser.share()
    for normaliser, population in pairs:
        normaliser.adopt(population)
    for module in model.modules():
        if isinstance(module, Normalised) and module.time_steps is not None:
            steps = [n.time_steps for n in _normalisers(module)]
            module.time_steps = max((k for k in steps if k is not None), default=None)
    return model


def _warn_if_steps_differ(model: nn.Module, populations: Mapping[nn.Module, Any]) -> None:
    """Warn once if time steps differ strongly in a layer that keeps one set for all of them."""
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
    """Run in eval mode with the batch's own statistics; nothing is updated.

    >>> import torch
    >>> from normrnn import LSTM
    >>> layer, x = LSTM(3, 4, norm="sequence").eval(), torch.randn(20, 6, 3) * 5 + 2
    >>> with batch_statistics(layer):
    ...     outputs = layer(x)[0]
    >>> torch.allclose(outputs, layer(x)[0]), torch.allclose(outputs, layer.train()(x)[0])
    (False, True)
    """
    with eval_mode(model), requesting(dict.fromkeys(_normalisers(model), BATCH)):
        yield model


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, True) for module in model.modules() if module.training]
    if modes:  # leave a model in eval mode untouched: it may serve other threads
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


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

    A model of one argument gets x of (x, y). Entries may be optional arguments, as ``hx``, only in
    a tuple; a list is what a DataLoader makes of any pair.
    """
    required, most = _positional(model)
    if isinstance(batch, list) and len(batch) != required and required != most:
        raise ValueError(
            f"a batch is a list of {len(batch)}, and it is not clear which of its entries "
            f"{type(model).__name__}.forward takes: {_STEP}; or make it a tuple of the arguments"
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
    """Return how many positional arguments ``forward`` needs, and takes; None: any number."""
    inner: Any = getattr(model, "_orig_mod", model)  # torch.compile
    parameters = list(inspect.signature(inner.forward).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):  # wrappers such as DDP
        wrapped = getattr(inner, "module", None)
        return _positional(wrapped) if isinstance(wrapped, nn.Module) else (0, None)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional), len(positional)


def run_batches(
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
