"""Streaming: a trained network fed a token, a frame or a chunk at a time."""

import copy
import threading
from typing import Any

import torch
from torch import Tensor, nn

from normrnn import norms
from normrnn.deploy.networks import folded, recurrent, with_layers
from normrnn.nn.base import Normalised

CHUNK = 8
"""From so many steps torch's fused kernel, which packs the weights at every call, is faster."""


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

    Streams of one set of weights (``fork``) are independent, and may be used in several threads.

    >>> import normrnn
    >>> layer = normrnn.LSTM(3, 4, norm=None).eval()
    >>> x = torch.randn(5, 3)
    >>> stream = Stream(layer)
    >>> first, rest = stream.push(x[0]), stream.push(x[1:])
    >>> first.shape, torch.allclose(torch.cat([first[None], rest]), layer(x)[0], atol=1e-6)
    (torch.Size([4]), True)
    """

    def __init__(self, model: nn.Module) -> None:
        self._network = _Network(model)
        self._state: Any = None
        self._lock = threading.Lock()

    @torch.no_grad()
    def push(self, input: Any) -> Tensor:
        """Return the output of the next token (an int) or frame (I,), or with a leading T of the
        next chunk of tokens (T,) or frames (T, I)."""
        with self._lock:
            output, self._state = self._network.run(input, self._state)
        return output

    def fork(self) -> "Stream":
        """Return another stream with the same weights and the same state."""
        other = copy.copy(self)
        other._lock = threading.Lock()
        with self._lock:
            other._state = self._state  # a state is replaced, never written to
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stream":
        other = copy.copy(self)
        other._network, other._lock = copy.deepcopy(self._network, memo), threading.Lock()
        with self._lock:
            other._state = copy.deepcopy(self._state, memo)
        return other

    def reset(self) -> None:
        """Start another sequence."""
        with self._lock:
            self._state = None


class _Network:
    """A copy of a model, fed with one sequence and a state; shared by several streams."""

    def __init__(self, model: nn.Module) -> None:
        layers = recurrent(model)
        for name, layer in layers.items():
            _check(layer, name or type(layer).__name__)
        self.batch_first = any(layer.batch_first for layer in layers.values())
        plain: Any = getattr(model, "plain_network", None)
        self.model = with_layers(model if plain is None else plain(), _fast, share=False)
        self.call = self.model if plain is None else self.model.stream
        self.inputs: int | None = None
        """Features of a frame, where they are known."""
        self.symbols: int | None = None
        """Tokens that there are, where they are known."""
        if plain is not None and hasattr(self.model, "embedding"):
            self.symbols = self.model.embedding.num_embeddings
        elif plain is not None or "" in layers:
            self.inputs = next(iter(layers.values())).input_size
        self.dtype = next((p.dtype for p in model.parameters()), torch.float32)

    def run(self, input: Any, state: Any) -> tuple[Tensor, Any]:
        """Return the output (T, …) of T steps and the next state; None is the initial state."""
        x = self._checked(input)
        # A token is an integer, a frame a vector of floats.
        single = x.dim() == (1 if x.is_floating_point() else 0)
        if not single and not len(x):  # no steps: the output of any step has the sizes
            return self._chunk(x.new_zeros(1, *x.shape[1:]), state)[0][:0], state
        output, state = self._chunk(x[None] if single else x, state)
        return (output[0] if single else output), state

    def _checked(self, input: Any) -> Tensor:
        if self.inputs is not None:
            is_tensor = isinstance(input, Tensor)
            x = input if is_tensor else torch.as_tensor(input, dtype=self.dtype)
            if x.dim() not in (1, 2) or x.shape[-1] != self.inputs:
                raise ValueError(
                    f"a frame is ({self.inputs},) and a chunk (T, {self.inputs}), "
                    f"got {tuple(x.shape)}"
                )
            return x
        x = torch.as_tensor(input)
        if self.symbols is None:
            return x
        if x.dim() > 1 or x.is_floating_point():
            raise ValueError(
                f"a token is an integer and a chunk (T,) of them, got {tuple(x.shape)} of {x.dtype}"
            )
        if x.numel() and not 0 <= int(x.min()) <= int(x.max()) < self.symbols:
            raise ValueError(f"tokens are ids from 0 to {self.symbols - 1}, got {x.tolist()}")
        return x.long()

    def _chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """(T, …) -> (T, …)."""
        output, after = self.call(x[None] if self.batch_first else x[:, None], state)
        return _frames_of(output, len(x), self.batch_first), after


class _Layer(nn.Module):
    """A plain layer for one sequence: torch's cells for few steps, its fused kernel for more."""

    def __init__(self, plain: nn.RNNBase) -> None:
        super().__init__()
        self.plain = plain
        self.is_lstm, self.batch_first = plain.mode == "LSTM", plain.batch_first
        for weight in plain.parameters():
            if weight.dim() == 2:  # column order is faster for products with a single row
                weight.data = weight.data.t().contiguous().t()
        names = {"LSTM": "lstm_cell", "GRU": "gru_cell"}
        names |= {"RNN_TANH": "rnn_tanh_cell", "RNN_RELU": "rnn_relu_cell"}
        self.cell = getattr(torch, names[plain.mode])

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the layer, as `hidden_size`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("plain"), name)

    def forward(
        self, input: Tensor, hx: Any = None, lengths: None = None, resets: None = None
    ) -> tuple[Tensor, Any]:
        if lengths is not None or resets is not None:
            raise ValueError("a stream is one sequence: call its layers without lengths and resets")
        dim = 1 if self.batch_first else 0
        if input.shape[dim] >= CHUNK:
            return self.plain(input, hx)
        if hx is None:
            B = input.shape[1 - dim]
            zero = input.new_zeros(self.plain.num_layers, B, self.plain.hidden_size)
            hx = (zero, zero) if self.is_lstm else zero
        state: list[Any] = list(
            zip(*(h.unbind(0) for h in hx), strict=True) if self.is_lstm else hx.unbind(0)
        )
        steps = []
        for x in input.unbind(dim):
            for number, weights in enumerate(self.plain.all_weights):
                state[number] = self.cell(x, state[number], *weights)
                x = state[number][0] if self.is_lstm else state[number]
            steps.append(x)
        if self.is_lstm:
            return torch.stack(steps, dim), tuple(map(torch.stack, zip(*state, strict=True)))
        return torch.stack(steps, dim), torch.stack(state)


def _fast(layer: nn.RNNBase, name: str) -> nn.Module:
    """Return what runs in the place of a layer: one that does not fold runs as it is."""
    new: nn.Module
    try:
        plain = folded(layer, name, keep=False)
        new = copy.deepcopy(layer) if plain.proj_size else _Layer(plain)
    except ValueError:
        new = copy.deepcopy(layer)
    new.register_forward_pre_hook(_check_call, with_kwargs=True)
    return new


def _frames_of(output: Tensor, time: int, batch_first: bool) -> Tensor:
    """Return an output (T, 1, …), (1, T, …) or flattened (T, C) as (T, …)."""
    shape = tuple(output.shape)
    if shape[:2] == ((1, time) if batch_first else (time, 1)):
        return output[0] if batch_first else output[:, 0]
    if len(shape) == 2 and shape[0] == time:
        return output
    raise ValueError(
        f"a stream needs an output for each of its {time} steps, and the model returned a tensor "
        f"of shape {shape}: expected {(1, time) if batch_first else (time, 1)} first, or "
        f"({time}, C)"
    )


def _check(layer: nn.RNNBase, name: str) -> None:
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


def _check_call(layer: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise ValueError if a layer is called with anything but one sequence."""
    x = args[0] if args else kwargs.get("input")
    if isinstance(x, Tensor) and x.dim() == 3 and x.shape[0 if layer.batch_first else 1] != 1:
        raise ValueError(
            f"a stream is one sequence, and a layer got a batch of shape {tuple(x.shape)}: models"
            " with batch_first layers are called with (1, T, …), others with (T, 1, …)"
        )
