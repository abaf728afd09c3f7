"""Trained networks as functions of tensors, and copies of models that can leave this library."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normrnn import norms
from normrnn.nn.base import Normalised
from normrnn.nn.convert import as_ours

Axes = dict[str, dict[int, str]]
"""Names of the axes that may change, by argument."""


class Network(nn.Module):
    """One of our networks as a function of tensors."""

    outputs: tuple[str, ...]
    """Names of what `forward` returns."""
    notes: Mapping[str, str]
    """JSON that a user needs beside the numbers, as the vocabulary."""
    usage: Mapping[str, str]
    """Code for the card: how a loaded file is called, by "tensors", "onnx" and "program"."""

    def stream(self, input: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the outputs of one piece of a sequence, and the state after it."""
        raise NotImplementedError

    def example_inputs(self) -> tuple[tuple[Tensor, ...], Axes]:
        """Return arguments to trace `forward` with, and their axes that may change."""
        raise NotImplementedError


class TextNetwork(Network):
    """A language model: tokens (T, B), h0[, c0] -> logits (T, B, C), hn[, cn]."""

    def __init__(
        self, embedding: nn.Embedding, rnn: nn.RNNBase, decoder: nn.Linear, notes: Mapping[str, str]
    ) -> None:
        super().__init__()
        self.embedding, self.rnn, self.decoder = embedding, rnn, decoder
        self.notes = notes
        states = ("h", "c") if rnn.mode == "LSTM" else ("h",)
        self.outputs = ("logits", *(f"{name}n" for name in states))
        size = f"{rnn.num_layers}, 2, {rnn.hidden_size}"
        names = ", ".join(f'"{name}0"' for name in states)
        self.usage = {
            "tensors": _TEXT_TENSORS,
            "onnx": _TEXT_ONNX.format(size=size, states=len(states), names=names),
            "program": _TEXT_PROGRAM.format(size=size, states=len(states)),
        }

    def forward(self, tokens: Tensor, h0: Tensor, c0: Tensor | None = None) -> tuple[Tensor, ...]:
        logits, after = self.stream(tokens, h0 if c0 is None else (h0, c0))
        return logits, *((after,) if isinstance(after, Tensor) else after)

    def stream(self, input: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, state = self.rnn(self.embedding(input), state)
        return self.decoder(output), state

    def example_inputs(self) -> tuple[tuple[Tensor, ...], Axes]:
        rnn, axes = self.rnn, {"tokens": {0: "T", 1: "B"}}
        names = ("h0", "c0")[: len(self.outputs) - 1]
        # Separate tensors: torch.export merges two arguments that are one tensor.
        state = [torch.zeros(rnn.num_layers, 2, rnn.hidden_size) for _ in names]
        return (torch.zeros(3, 2, dtype=torch.long), *state), axes | {n: {1: "B"} for n in names}


class FrameNetwork(Network):
    """An acoustic model: features (T, B, F), lengths (B,) -> log posteriors, 0 in the padding."""

    mean: Tensor
    scale: Tensor
    outputs = ("log_posteriors",)

    def __init__(self, mean: Tensor, scale: Tensor, rnn: nn.RNNBase, decoder: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        self.rnn, self.decoder = rnn, decoder
        self.notes: Mapping[str, str] = {}
        texts = {"tensors": _SPEECH_TENSORS, "onnx": _SPEECH_ONNX, "program": _SPEECH_PROGRAM}
        self.usage = {name: text.format(F=len(mean)) for name, text in texts.items()}

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        output, _ = self.rnn((features - self.mean) * self.scale, lengths=lengths)
        logs = self.decoder(output).log_softmax(-1)
        time = torch.arange(features.shape[0], device=features.device)
        return torch.where((time[:, None] < lengths)[:, :, None], logs, 0.0)

    def stream(self, input: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, state = self.rnn((input - self.mean) * self.scale, state)
        return self.decoder(output).log_softmax(-1), state

    def example_inputs(self) -> tuple[tuple[Tensor, ...], Axes]:
        features = torch.zeros(3, 2, len(self.mean))
        return (features, torch.tensor([3, 2])), {"features": {0: "T", 1: "B"}, "lengths": {0: "B"}}


def recurrent(model: nn.Module) -> dict[str, nn.RNNBase]:
    """Return the recurrent layers under all of their names."""
    every = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in every if isinstance(module, nn.RNNBase)}


def with_layers(
    model: nn.Module, change: Callable[[nn.RNNBase, str], nn.Module], share: bool = True
) -> Any:
    """Return a copy in eval mode in which `change` replaced each recurrent layer.

    `share`: other weights are those of the model; without it they are copied.
    """
    memo = _shared(model) if share else {}
    layers = {id(layer): (layer, name) for name, layer in recurrent(model).items()}
    for key, (layer, name) in layers.items():
        memo[key] = change(layer, name or type(layer).__name__)
    return copy.deepcopy(model, memo).eval().requires_grad_(False)


def _shared(model: nn.Module) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` with which a copy shares its tensors with the model."""
    memo: dict[int, Any] = {id(b): b.detach() for b in model.buffers()}
    return memo | {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}


def folded(layer: nn.RNNBase, name: str, keep: bool) -> nn.RNNBase:
    """Return the layer without normalisation; `keep`: as one of ours, with norm=None.

    Raise ValueError with the reason, and what to do instead, if the layer does not fold.
    """
    if not isinstance(layer, Normalised):
        return as_ours(layer) if keep else copy.deepcopy(layer)
    try:
        layer.check_foldable(name, keep=keep)
    except ValueError as error:
        raise ValueError(f"{error}; {_advice()}") from None
    return layer.folded(keep=keep)


def traceable(
    model: nn.Module, operators: Callable[[Normalised], nn.Module] | None = None
) -> nn.Module:
    """Return a copy for torch's exporters: recurrent layers are ours, folded where they fold.

    `operators` replaces those that fold. Raise ValueError for layers that need the statistics of a
    batch.
    """

    def change(layer: nn.RNNBase, name: str) -> nn.Module:
        try:
            new: Any = folded(layer, name, keep=True)
            new = new if operators is None else operators(new)
        except ValueError:
            assert isinstance(layer, Normalised)
            if not all(n.is_fixed for n in layer.normalisers()):
                raise
            new = copy.deepcopy(layer, _shared(layer))
        new.register_forward_pre_hook(_check_call, with_kwargs=True)
        return new

    return with_layers(model, change)


def _check_call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError if a traced layer is called with anything but a dense or padded batch."""
    values = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
    input, lengths = values.get("input"), values.get("lengths")
    if values.get("resets") is not None:
        raise ValueError("an export takes no resets=: cut the sequences there, and give no state")
    if not isinstance(input, Tensor):
        raise ValueError("an export takes no PackedSequence: give a padded batch and lengths=")
    if input.dim() != 3:
        raise ValueError(f"an export takes batches (T, B, I), got {tuple(input.shape)}")
    if not isinstance(lengths, Tensor | None):
        raise ValueError("lengths= has to be a tensor, or an export would keep those of example=")


def _advice() -> str:
    """Say which norms fold."""
    rows = [row for row in map(norms.get, norms.names()) if row.normalises and not row.unfoldable]
    names = ", ".join(row.name for row in rows)
    return (
        f"norms that fold are {names}, with statistics shared over time and the cell not"
        " normalised; the formats onnx and program need no folding"
    )


_TEXT_TENSORS = """
tokens = torch.zeros(5, 2, dtype=torch.long)  # ids (T, B); notes["vocabulary"] says what they mean
output, state = model["rnn"](model["embedding"](tokens))  # pass the state with the next tokens
logits = model["decoder"](output)  # (T, B, symbols)
"""
_TEXT_ONNX = """\
state = [numpy.zeros(({size}), "float32")] * {states}
tokens = numpy.zeros((5, 2), "int64")  # ids (T, B)
# session.get_modelmeta().custom_metadata_map["vocabulary"] says what they mean
inputs = {{"tokens": tokens, **dict(zip([{names}], state))}}
logits, *state = session.run(None, inputs)  # (T, B, symbols)
"""
_TEXT_PROGRAM = """\
state = [torch.zeros({size})] * {states}
tokens = torch.zeros(5, 2, dtype=torch.long)  # ids (T, B): vocabulary.json in the file
logits, *state = model(tokens, *state)  # (T, B, symbols)
"""
_SPEECH_TENSORS = """
features, lengths = torch.randn(50, 2, {F}), [50, 30]  # padded (T, B, F)
rows = (features - values["mean"]) * values["scale"]
packed = torch.nn.utils.rnn.pack_padded_sequence(rows, lengths, enforce_sorted=False)
output, _ = torch.nn.utils.rnn.pad_packed_sequence(model["rnn"](packed)[0])
log_posteriors = model["decoder"](output).log_softmax(-1)  # (T, B, states)
"""
_SPEECH_ONNX = """\
features = numpy.zeros((50, 2, {F}), "float32")  # padded (T, B, F)
lengths = numpy.array([50, 30])
(log_posteriors,) = session.run(None, {{"features": features, "lengths": lengths}})
"""
_SPEECH_PROGRAM = """\
features, lengths = torch.randn(50, 2, {F}), torch.tensor([50, 30])  # padded (T, B, F)
log_posteriors = model(features, lengths)  # (T, B, states)
"""
