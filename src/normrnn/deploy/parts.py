"""A trained network as plain numbers, normalisation folded, worked out layer by layer."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normrnn import norms
from normrnn.nn import fold
from normrnn.nn.base import Normalised
from normrnn.nn.convert import as_ours
from normrnn.ops.fold import torch_parameters


def _advice() -> str:
    """Which norms fold."""
    rows = [row for row in map(norms.of, norms.names()) if row.normalises and not row.unfoldable]
    whole, by_step = (
        " or ".join(row.name for row in rows if row.takes_time_steps is steps)
        for steps in (False, True)
    )
    return (
        f"choose a norm that folds ({whole}; {by_step} with statistics shared over time, which"
        " normrnn.recalibrate(..., shared=True) makes of others, and the cell not normalised), or"
        " the format onnx or program"
    )


class Direction(NamedTuple):
    """One layer and direction as torch has it: W_x (C, I), W_h (C, H), biases (C,); peepholes (H,)
    of i, f and o, None for those that are not there."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor
    b_hh: Tensor
    peephole: tuple[Tensor | None, ...] = (None, None, None)


@dataclass(frozen=True)
class Recurrent:
    """A stack of recurrent layers without normalisation, of the same eval output.

    >>> import normrnn
    >>> layer = normrnn.LSTM(3, 4, norm=None)
    >>> [tuple(t.shape) for t in Recurrent(layer).direction(0)[:4]]
    [(16, 3), (16, 4), (16,), (16,)]
    """

    layer: nn.RNNBase

    def check(self, projected: bool = False) -> None:
        """ValueError with the reason, and what to do instead, if there is no such stack.

        ``projected``: one with ``proj_size`` will do.
        """
        layer, name = self.layer, type(self.layer).__name__
        if layer.proj_size and not projected:
            raise ValueError(
                f"{name} has proj_size={layer.proj_size}, which ONNX's recurrent operators have not"
            )
        if isinstance(layer, Normalised):
            if any(layer.zoneout):
                raise ValueError(
                    f"{name} cannot be exported so: zoneout={layer.zoneout} keeps a share of every "
                    "state, which torch's layers do not; choose the format onnx or program"
                )
            try:
                layer.check_foldable(name, keep=True)
            except ValueError as error:
                raise ValueError(f"{error}; {_advice()}") from None

    @property
    def mode(self) -> str:
        """LSTM, GRU, RNN_TANH or RNN_RELU."""
        return self.layer.mode

    @property
    def layers(self) -> int:
        return self.layer.num_layers

    @property
    def directions(self) -> int:
        return 2 if self.layer.bidirectional else 1

    @property
    def hidden(self) -> int:
        return self.layer.hidden_size

    @property
    def states(self) -> int:
        """Two of an LSTM, h and c; one of the others."""
        return 2 if self.mode == "LSTM" else 1

    @property
    def peepholes(self) -> bool:
        return getattr(self.layer, "peephole", None) is not None

    @property
    def zoneout(self) -> tuple[float, ...]:
        """Shares of h and c that a step keeps."""
        return getattr(self.layer, "zoneout", (0.0, 0.0))

    @torch.no_grad()
    def direction(self, index: int) -> Direction:
        """By torch's order: layer 0 forward, layer 0 backward, layer 1 forward, …"""
        layer = self.layer
        normalisers = layer.normalisers() if isinstance(layer, Normalised) else []
        if not normalisers:
            values = [getattr(layer, name).detach() for name in layer._all_weights[index]]
            if len(values) == 2:  # bias=False
                values += [values[0].new_zeros(len(values[0]))] * 2
        else:
            assert isinstance(layer, Normalised)
            folded = normalisers[index].folded(layer.weights()[index])
            values = [value.detach() for value in torch_parameters(folded)]
        peephole: Any = (None, None, None)
        if isinstance(layer, Normalised) and self.peepholes:
            found = layer.weights()[index][3:6]
            peephole = tuple(None if vector is None else vector.detach() for vector in found)
        w_ih, w_hh, b_ih, b_hh = values
        return Direction(w_ih, w_hh, b_ih, b_hh, peephole)

    def options(self) -> dict[str, Any]:
        """Arguments of the torch.nn layer."""
        layer = self.layer
        names = "input_size", "hidden_size", "num_layers", "batch_first", "bidirectional"
        more = {"nonlinearity": layer.nonlinearity} if layer.mode.startswith("RNN") else {}
        return {name: getattr(layer, name) for name in names} | more

    @property
    def kind(self) -> str:
        """Name of the torch.nn layer."""
        return self.mode.partition("_")[0]

    def check_torchs(self) -> None:
        """ValueError if torch.nn has no such layer."""
        self.check(projected=True)
        if self.peepholes:
            raise ValueError(
                "torch's layers have no peepholes: the formats onnx and program have them"
            )

    def weights(self) -> dict[str, Tensor]:
        """The state dict of the torch.nn layer; ValueError if there is none."""
        self.check_torchs()
        found = {}
        for number in range(self.layers * self.directions):
            suffix = f"l{number // self.directions}" + "_reverse" * (number % self.directions)
            names = (
                f"{name}_{suffix}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            found |= zip(names, self.direction(number)[:4], strict=True)
        return found


def without_norms(model: nn.Module, change: Callable[[nn.RNNBase], nn.Module | None]) -> nn.Module:
    """A folded copy of a user's own model, in which each recurrent layer, ours or torch's, is what
    ``change`` makes of it (None: as it is); ValueError if a layer does not fold."""
    try:
        copied = fold(model, plain=False)
    except ValueError as error:
        raise ValueError(f"{error}; {_advice()}") from None
    layers = {
        name: module
        for name, module in copied.named_modules(remove_duplicate=False)
        if isinstance(module, nn.RNNBase)
    }
    changed = {layer: change(layer) or layer for layer in {*layers.values()}}
    for name, layer in layers.items():
        if not name:
            return changed[layer]
        copied.set_submodule(name, changed[layer])
    return copied


def scannable(model: nn.Module) -> Any:
    """A copy for torch's exporters: recurrent layers, ours or torch's, are ours, and folded where
    they fold. ValueError for those that need the statistics of a batch."""
    copied = copy.deepcopy(model).eval()
    layers = {
        name: module
        for name, module in copied.named_modules(remove_duplicate=False)
        if isinstance(module, nn.RNNBase)
    }
    changed = {layer: _scannable(layer, name) for name, layer in layers.items()}
    for layer in {*changed.values()}:
        layer.register_forward_pre_hook(_check_call, with_kwargs=True)
    for name, layer in layers.items():
        if not name:
            return changed[layer]
        copied.set_submodule(name, changed[layer])
    return copied


def _scannable(layer: nn.RNNBase, name: str) -> Normalised:
    if not isinstance(layer, Normalised):
        return as_ours(layer)
    try:
        layer.check_foldable(name or type(layer).__name__, keep=True)
    except ValueError as error:
        if not all(n.is_fixed for n in layer.normalisers()):
            raise ValueError(f"{error}; {_advice()}") from None
        return layer
    folded = layer.folded(keep=True)
    assert isinstance(folded, Normalised)
    return folded


def _check_call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
    dense_or_padded(given.get("input"), given.get("lengths"), None)


def dense_or_padded(input: Any, lengths: Any, resets: Any) -> None:
    """ValueError with what to do instead if a traced layer is called with anything else."""
    if resets is not None:
        raise ValueError("an export knows no resets=: cut the sequences there, and give no state")
    if not isinstance(input, Tensor):
        raise ValueError("an export knows no PackedSequence: give a padded batch and lengths=")
    if input.dim() != 3:
        raise ValueError(f"an export takes batches (T, B, I), got {tuple(input.shape)}")
    if not isinstance(lengths, Tensor | None):
        raise ValueError("lengths= has to be a tensor, or an export would keep those of example=")


@dataclass(frozen=True)
class Parts:
    """A whole network: a lookup table or normalised features, a recurrent stack, a softmax.

    With an ``embedding`` (V, E) it takes tokens and a state and gives logits; else it takes ragged
    features, (x − mean) · scale, and gives log posteriors.
    """

    recurrent: Recurrent
    decoder: nn.Linear
    embedding: Tensor | None = None
    mean: Tensor | None = None
    scale: Tensor | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    """What a user needs beside the numbers, as `vocabulary`: JSON."""

    @property
    def classes(self) -> int:
        return self.decoder.out_features
