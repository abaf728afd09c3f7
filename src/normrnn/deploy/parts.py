"""A trained network in parts, its normalisation folded into plain weights."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn

from normrnn import norms
from normrnn.nn import fold
from normrnn.nn.base import Normalised
from normrnn.nn.convert import as_ours


def _advice() -> str:
    """Say which norms fold."""
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
    """Weights of one layer and direction: W_x (C, I), W_h (C, H), two biases (C,), and the
    peepholes (H,) of i, f and o, None where there is none."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor
    b_hh: Tensor
    peephole: tuple[Tensor | None, ...] = (None, None, None)


@dataclass(frozen=True)
class Recurrent:
    """A stack of recurrent layers, to be written without normalisation.

    >>> import normrnn
    >>> layer = normrnn.LSTM(3, 4, norm="sequence")
    >>> [tuple(t.shape) for t in Recurrent(layer).direction(0)[:4]]
    [(16, 3), (16, 4), (16,), (16,)]
    """

    layer: nn.RNNBase

    def check(self, projected: bool = False) -> None:
        """Raise ValueError with the reason, and what to do instead, if the layer does not fold.

        `projected`: whether `proj_size` is allowed.
        """
        layer, name = self.layer, type(self.layer).__name__
        if layer.proj_size and not projected:
            raise ValueError(
                f"{name} has proj_size={layer.proj_size}, which ONNX's recurrent operators have not"
            )
        if isinstance(layer, Normalised):
            if layer.needs_our_layer:
                raise ValueError(
                    f"{name} cannot be exported so: {layer.needs_our_layer}; choose the format "
                    "program"
                )
            if any(layer.zoneout):
                raise ValueError(
                    f"{name} cannot be exported so: zoneout={layer.zoneout} keeps a share of every "
                    "state, which torch's layers do not; choose the format onnx or program"
                )
            try:
                layer.check_foldable(name, keep=True)
            except ValueError as error:
                raise ValueError(f"{error}; {_advice()}") from None

    def check_torch(self) -> None:
        """Raise ValueError if torch.nn has no such layer."""
        self.check(projected=True)
        if self.has_peepholes:
            raise ValueError(
                "torch's layers have no peepholes: the formats onnx and program have them"
            )

    @property
    def mode(self) -> str:
        """LSTM, GRU, RNN_TANH or RNN_RELU."""
        return self.layer.mode

    @property
    def kind(self) -> str:
        """Name of the torch.nn layer."""
        return self.mode.partition("_")[0]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.layer.num_layers

    @property
    def directions(self) -> int:
        """Directions of each layer."""
        return 2 if self.layer.bidirectional else 1

    @property
    def hidden(self) -> int:
        """Units of each direction."""
        return self.layer.hidden_size

    @property
    def states(self) -> int:
        """Tensors of a state: h and c of an LSTM, else h."""
        return 2 if self.mode == "LSTM" else 1

    @property
    def has_peepholes(self) -> bool:
        """Whether it is an LSTM with peepholes."""
        return getattr(self.layer, "peephole", None) is not None

    @cached_property
    def plain(self) -> nn.RNNBase:
        """The layer without normalisation."""
        layer = self.layer
        return layer.folded(keep=True) if isinstance(layer, Normalised) else layer

    def direction(self, index: int) -> Direction:
        """Return the weights in torch's order: layer 0 forward, layer 0 backward, layer 1, …"""
        suffix = f"l{index // self.directions}" + "_reverse" * (index % self.directions)

        def find(name: str) -> Tensor | None:
            value = getattr(self.plain, f"{name}_{suffix}", None)
            return None if value is None else value.detach()

        w_ih, w_hh, b_ih, b_hh = map(find, ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        assert w_ih is not None
        assert w_hh is not None
        zero = w_ih.new_zeros(len(w_ih))  # of a layer without biases
        peephole = tuple(find(f"weight_c{gate}") for gate in "ifo")
        b_ih, b_hh = (zero if bias is None else bias for bias in (b_ih, b_hh))
        return Direction(w_ih, w_hh, b_ih, b_hh, peephole)

    def description(self, *more: str) -> dict[str, Any]:
        """Class name and arguments of the torch.nn layer; `more` names further arguments."""
        names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "bidirectional")
        options = {name: getattr(self.plain, name) for name in (*names, *more)}
        if self.layer.proj_size:
            options["proj_size"] = self.layer.proj_size
        if self.kind == "RNN":
            options["nonlinearity"] = self.layer.nonlinearity
        return {"type": self.kind, "options": options}


def without_norms(model: nn.Module, change: Callable[[nn.RNNBase], nn.Module | None]) -> nn.Module:
    """Return a folded copy in which `change` replaced each recurrent layer (None: kept).

    Raise ValueError if a layer does not fold.
    """
    try:
        copied = fold(model, plain=False)
    except ValueError as error:
        raise ValueError(f"{error}; {_advice()}") from None
    return _with_layers(copied, lambda layer, _: change(layer) or layer)


def scannable(model: nn.Module) -> Any:
    """Return a copy for torch's exporters: recurrent layers are ours, folded where they fold.

    Raise ValueError for layers that need the statistics of a batch.
    """

    def change(layer: nn.RNNBase, name: str) -> nn.Module:
        changed = _scannable(layer, name)
        changed.register_forward_pre_hook(_check_call, with_kwargs=True)
        return changed

    return _with_layers(copy.deepcopy(model).eval(), change)


def _with_layers(model: nn.Module, change: Callable[[nn.RNNBase, str], nn.Module]) -> nn.Module:
    """Replace each recurrent layer of a model, under all of its names."""
    every = list(model.named_modules(remove_duplicate=False))
    changed: dict[nn.Module, nn.Module] = {}
    for name, layer in every:
        if isinstance(layer, nn.RNNBase):
            if layer not in changed:
                changed[layer] = change(layer, name)
            if not name:
                return changed[layer]
            model.set_submodule(name, changed[layer])
    return model


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
    """Raise ValueError if a traced layer is called with anything but a dense or padded batch."""
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
    """A whole network: embedding or standardised features, a recurrent stack, a linear layer.

    With an `embedding` (V, E) it takes tokens and a state and returns logits; else it takes ragged
    features, (x − mean) · scale, and returns log posteriors.
    """

    recurrent: Recurrent
    decoder: nn.Linear
    embedding: Tensor | None = None
    mean: Tensor | None = None
    scale: Tensor | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    """JSON that a user needs beside the numbers, as the `vocabulary`."""
