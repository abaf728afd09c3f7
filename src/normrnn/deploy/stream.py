"""Streaming: a trained network fed a token, a frame or a chunk at a time."""

import copy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from normrnn import norms
from normrnn.deploy.networks import folded, recurrent, with_layers
from normrnn.nn.base import Normalised

CHUNK = 8
"""From so many steps torch's fused kernel, which packs the weights at every call, is faster."""
_CELLS = {
    "LSTM": torch.lstm_cell,
    "GRU": torch.gru_cell,
    "RNN_TANH": torch.rnn_tanh_cell,
    "RNN_RELU": torch.rnn_relu_cell,
}


class Stream:
    """One sequence through a unidirectional model, piece by piece.

    Outputs are those of the whole sequence in eval mode. The weights are copied and folded once, so
    that training the model further does not affect the stream. Memory does not grow with the
    sequence.

    Args:
        model: a network of a run, one of our layers or torch's, or a model of your own that is
            called as ``model(input, state)``, with (T, 1, …) and None at first, and returns output
            and state; with (1, T, …) if the recurrent layers inside are ``batch_first``. The output
            begins with the same two sizes, or is flattened to (T, C).

    A stream is for one thread at a time; streams of one set of weights (``fork``) are independent.

    >>> import normrnn
    >>> layer = normrnn.LSTM(3, 4, norm=None).eval()
    >>> x = torch.randn(5, 3)
    >>> stream = Stream(layer)
    >>> first, rest = stream.push(x[0]), stream.push(x[1:])
    >>> first.shape, torch.allclose(torch.cat([first[None], rest]), layer(x)[0], atol=1e-6)
    (torch.Size([4]), True)
    """

    def __init__(self, model: nn.Module) -> None:
        layers = recurrent(model)
        for name, layer in layers.items():
            _check(layer, name or type(layer).__name__)
        self._takes_frames = isinstance(model, nn.RNNBase)
        self._batch_dim = 0 if any(layer.batch_first for layer in layers.values()) else 1
        self._dtype = next((p.dtype for p in model.parameters()), torch.float32)
        copied = with_layers(model, _fold_for_streaming)
        self._call = getattr(copied, "read_piece", copied)
        self._state: Any = None

    @torch.no_grad()
    def push(self, input: Any) -> Tensor:
        """Return the output of the next token (an int) or frame (I,), or with a leading T of the
        next chunk of tokens (T,) or frames (T, I), T ≥ 1."""
        x = torch.as_tensor(input)
        if self._takes_frames or x.is_floating_point():
            x = x.to(self._dtype)
        is_step = x.dim() == (1 if x.is_floating_point() else 0)
        batch = (x[None] if is_step else x).unsqueeze(self._batch_dim)
        output, state = self._call(batch, self._state)
        steps = batch.shape[1 - self._batch_dim]
        if output.shape[:2] == batch.shape[:2]:
            output = output.squeeze(self._batch_dim)
        elif output.dim() != 2 or len(output) != steps:
            raise ValueError(
                f"a stream needs an output for each of its {steps} steps, and the model returned "
                f"shape {tuple(output.shape)}: expected {tuple(batch.shape[:2])} first, or "
                f"({steps}, C)"
            )
        self._state = state
        return output[0] if is_step else output

    def fork(self) -> "Stream":
        """Return another stream with the same weights and the same state."""
        return copy.copy(self)  # a state is replaced, never written to

    def reset(self) -> None:
        """Start another sequence."""
        self._state = None


def _check(layer: nn.RNNBase, name: str) -> None:
    """Raise ValueError for a layer whose output at a step depends on more than the past."""
    if layer.bidirectional:
        raise ValueError(f"{name} is bidirectional: it needs the whole sequence")
    if isinstance(layer, Normalised) and norms.get(layer.norm).keeps_statistics:
        if layer.time_steps is not None:
            raise ValueError(
                f"{name} has statistics that differ over {layer.time_steps} time steps, and a "
                "stream has no end: normrnn.recalibrate(..., shared=True) makes one of them"
            )
        if any(getattr(n, "running_mean", None) is None for n in layer.normalisers()):
            raise ValueError(f"{name} has no running statistics, and one step has none of its own")


def _fold_for_streaming(layer: nn.RNNBase, name: str) -> nn.Module:
    """Return what runs in the place of a layer: one that does not fold runs as it is."""
    try:
        new: Any = folded(layer, name, keep=False)
    except ValueError:
        new = copy.deepcopy(layer)
    else:
        for weight in new.parameters():
            if weight.dim() == 2:  # column order is faster for products with a single row
                weight.data = weight.data.t().contiguous().t()
        new.forward = MethodType(_forward, new)
    new.register_forward_pre_hook(_check_batch, with_kwargs=True)
    return new


def _forward(
    layer: Any, input: Tensor, hx: Any = None, lengths: None = None, resets: None = None
) -> tuple[Tensor, Any]:
    """Run a plain layer: torch's cells for few steps, its fused kernel for more."""
    if lengths is not None or resets is not None:
        raise ValueError("a stream is one sequence: call its layers without lengths and resets")
    dim, is_lstm = 1 if layer.batch_first else 0, layer.mode == "LSTM"
    if layer.proj_size or input.shape[dim] >= CHUNK:
        return type(layer).forward(layer, input, hx)
    if hx is None:
        zero = input.new_zeros(layer.num_layers, input.shape[1 - dim], layer.hidden_size)
        hx = (zero, zero) if is_lstm else zero
    state: list[Any] = list(zip(*hx, strict=True) if is_lstm else hx)
    cell, steps = _CELLS[layer.mode], []
    for x in input.unbind(dim):
        for number, weights in enumerate(layer.all_weights):
            state[number] = cell(x, state[number], *weights)
            x = state[number][0] if is_lstm else state[number]
        steps.append(x)
    final = tuple(map(torch.stack, zip(*state, strict=True))) if is_lstm else torch.stack(state)
    return torch.stack(steps, dim), final


def _check_batch(layer: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise ValueError if a layer is called with anything but one sequence."""
    x = args[0] if args else kwargs["input"]
    if x.dim() == 3 and x.shape[0 if layer.batch_first else 1] != 1:
        raise ValueError(
            f"a stream is one sequence, and a layer got a batch of shape {tuple(x.shape)}: models"
            " with batch_first layers are called with (1, T, …), others with (T, 1, …)"
        )
