"""The format program: torch.export's, with dynamic time and batch.

torch.export unrolls torch's own layers for a fixed number of steps; its ``scan`` does not. So the
recurrence is written with that, from folded weights, peepholes included.
"""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.export import Dim
from torch.fx.experimental import _config as shapes

from normrnn.deploy.parts import Direction, Parts, Recurrent, dense_or_padded, without_norms
from normrnn.files import deferring, replacing

State = tuple[Tensor, ...]


class Scanned(nn.Module):
    """A stack of plain recurrent layers on padded or dense input, as torch's layer is called."""

    def __init__(self, rnn: Recurrent) -> None:
        super().__init__()
        self.mode, self.layers, self.directions = rnn.mode, rnn.layers, rnn.directions
        self.hidden, self.states = rnn.hidden, rnn.states
        self.batch_first, self.zoneout = rnn.layer.batch_first, rnn.zoneout
        for number in range(self.layers * self.directions):
            of = rnn.direction(number)
            for name, value in zip(_NAMES, [*of[:4], *of.peephole], strict=True):
                self.register_buffer(f"{name}_{number}", value)

    def forward(
        self,
        input: Tensor,
        hx: Tensor | State | None = None,
        lengths: Tensor | None = None,
        resets: None = None,
    ) -> tuple[Tensor, Tensor | State]:
        """(T, B, I) or batch first -> outputs, and the state after each sequence's last step."""
        dense_or_padded(input, lengths, resets)
        x = input.transpose(0, 1) if self.batch_first else input
        if hx is None:
            zeros = x.new_zeros(self.layers * self.directions, x.shape[1], self.hidden)
            hx = (zeros,) * self.states
        before = (hx,) if isinstance(hx, Tensor) else hx
        inside = None if lengths is None else _before(x, lengths)
        after: list[State] = []
        for layer in range(self.layers):
            found = []
            for number in range(layer * self.directions, (layer + 1) * self.directions):
                flip = _flip(x, lengths) if number % self.directions else None
                given = x if flip is None else flip(x)
                start = tuple(s[number] for s in before)
                output, final = self._direction(number, given, start, inside)
                found.append(output if flip is None else flip(output))
                after.append(final)
            x = torch.cat(found, 2)
        states = tuple(map(torch.stack, zip(*after, strict=True)))
        x = x.transpose(0, 1) if self.batch_first else x
        return x, states if self.mode == "LSTM" else states[0]

    def _direction(
        self, number: int, x: Tensor, start: State, inside: Tensor | None
    ) -> tuple[Tensor, State]:
        values: list[Any] = [getattr(self, f"{name}_{number}") for name in _NAMES]
        of = Direction(*values[:4], tuple(values[4:]))  # type: ignore[call-arg]
        cell, relu = _STEPS[self.mode.partition("_")[0]], self.mode == "RNN_RELU"

        def step(state: State, gates: Tensor) -> State:
            after = cell(of, relu, state, gates)
            if not any(self.zoneout):
                return after
            kept = zip(after, state, self.zoneout, strict=False)
            return tuple(torch.lerp(new, old, share) for new, old, share in kept)

        def dense(state: State, gates: Tensor) -> tuple[State, Tensor]:
            new = step(state, gates)
            return new, new[0].clone()

        def ragged(state: State, at: tuple[Tensor, Tensor]) -> tuple[State, Tensor]:
            gates, inside = at
            new = step(state, gates)
            kept = tuple(torch.where(inside, n, s) for n, s in zip(new, state, strict=True))
            return kept, torch.where(inside, new[0], torch.zeros_like(new[0]))

        gates = torch.nn.functional.linear(x, of.w_ih, of.b_ih)
        if inside is None:
            final, output = scan(dense, start, gates, dim=0)
        else:
            # What lies in the padding may be no number.
            gates = torch.where(inside, gates, torch.zeros_like(gates))
            final, output = scan(ragged, start, (gates, inside), dim=0)
        return output, tuple(final)


_NAMES = ("w_ih", "w_hh", "b_ih", "b_hh", "peephole_i", "peephole_f", "peephole_o")


def _lstm(of: Direction, _: bool, state: State, gates: Tensor) -> State:
    h, c = state
    i, f, g, o = (gates + h @ of.w_hh.t() + of.b_hh).chunk(4, 1)
    of_i, of_f, of_o = of.peephole
    i = i if of_i is None else i + of_i * c
    f = f if of_f is None else f + of_f * c
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    o = o if of_o is None else o + of_o * c
    return o.sigmoid() * c.tanh(), c


def _gru(of: Direction, _: bool, state: State, gates: Tensor) -> State:
    (h,) = state
    x_r, x_z, x_n = gates.chunk(3, 1)
    h_r, h_z, h_n = (h @ of.w_hh.t() + of.b_hh).chunk(3, 1)
    z = (x_z + h_z).sigmoid()
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return ((1 - z) * n + z * h,)


def _rnn(of: Direction, relu: bool, state: State, gates: Tensor) -> State:
    sums = gates + state[0] @ of.w_hh.t() + of.b_hh
    return (sums.relu() if relu else sums.tanh(),)


_STEPS: dict[str, Callable[[Direction, bool, State, Tensor], State]] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN": _rnn,
}


def _before(x: Tensor, lengths: Tensor) -> Tensor:
    """Whether a frame (T, B, 1) lies inside its sequence."""
    return (torch.arange(x.shape[0], device=x.device)[:, None] < lengths[None])[:, :, None]


def _flip(x: Tensor, lengths: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Turns each sequence round over its own length; padding stays where it is."""
    if lengths is None:
        return lambda y: y.flip(0)
    t = torch.arange(x.shape[0], device=x.device)[:, None]
    index = torch.where(t < lengths[None], lengths[None] - 1 - t, t)[:, :, None]
    return lambda y: y.gather(0, index.expand(y.shape))


def _fixed(layer: nn.Linear) -> nn.Linear:
    """The same numbers, not trained: a program whose weights are would compile its way back."""
    new = copy.copy(layer)
    new._parameters = {
        name: None if value is None else nn.Parameter(value.detach(), requires_grad=False)
        for name, value in layer._parameters.items()
    }
    return new


class _Text(nn.Module):
    """Tokens (T, B), h0[, c0] -> logits, hn[, cn]."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        assert parts.embedding is not None
        self.embedding = nn.Embedding.from_pretrained(parts.embedding)
        self.rnn, self.decoder = Scanned(parts.recurrent), _fixed(parts.decoder)

    def forward(self, tokens: Tensor, h0: Tensor, c0: Tensor | None = None) -> State:
        state = h0 if c0 is None else (h0, c0)
        output, after = self.rnn(self.embedding(tokens), state)
        return self.decoder(output), *((after,) if isinstance(after, Tensor) else after)


class _Speech(nn.Module):
    """Features (T, B, F), lengths (B,) -> log posteriors, 0 in the padding."""

    mean: Tensor
    scale: Tensor

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.register_buffer("mean", parts.mean)
        self.register_buffer("scale", parts.scale)
        self.rnn, self.decoder = Scanned(parts.recurrent), _fixed(parts.decoder)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        inside = _before(features, lengths)
        output, _ = self.rnn((features - self.mean) * self.scale, None, lengths)
        logs = self.decoder(output).log_softmax(-1)
        return torch.where(inside, logs, torch.zeros_like(logs))


def write(parts: Parts, path: Path, card: str) -> None:
    """One of our networks."""
    T, B, rnn = Dim("T"), Dim("B"), parts.recurrent
    if parts.embedding is None:
        assert parts.mean is not None
        example = torch.zeros(3, 2, len(parts.mean)), torch.tensor([3, 2])
        _write(_Speech(parts), example, ({0: T, 1: B}, {0: B}), path, card, parts.notes)
        return
    # Not one tensor twice: torch.export takes the second for the first then.
    size = rnn.layers * rnn.directions, 2, rnn.hidden
    states = [torch.zeros(size) for _ in range(rnn.states)]
    example = torch.zeros(3, 2, dtype=torch.long), *states
    dynamic = ({0: T, 1: B}, *[{1: B}] * rnn.states)
    _write(_Text(parts), example, dynamic, path, card, parts.notes)


def write_traced(
    model: nn.Module, example: tuple[Any, ...], dynamic: Any, path: Path, card: str
) -> None:
    """A user's own model, its recurrent layers replaced; `dynamic` as torch.export has its
    `dynamic_shapes`."""
    plain = without_norms(model, _scanned).requires_grad_(False)
    _write(plain, example, dynamic, path, card, {})


def _scanned(layer: nn.RNNBase) -> Scanned:
    recurrent = Recurrent(layer)
    recurrent.check(zoneout=True)
    return Scanned(recurrent)


def _write(model: nn.Module, example: Any, dynamic: Any, path: Path, card: str, notes: Any) -> None:
    # Sizes that happen to be equal in the example, a batch of 3 and a GRU's gates, stay two sizes.
    apart: Any = shapes.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with warnings.catch_warnings(), torch.no_grad(), apart:
        warnings.simplefilter("ignore")  # of a part of torch that is young
        program = torch.export.export(model.eval(), example, dynamic_shapes=dynamic, strict=False)
    extra = {"card.md": card, **{f"{name}.json": text for name, text in notes.items()}}
    with replacing(path) as file, deferring(file) as patient:
        torch.export.save(program, patient, extra_files=extra)


def snippet(parts: Parts | None, name: str) -> str:
    """Code that runs the file with torch alone."""
    start = (
        "import torch\n\n# unpickles: only for files of people you trust\n"
        f"model = torch.export.load({json.dumps(name)}).module()\n"
    )
    if parts is None:
        return start
    rnn = parts.recurrent
    if parts.embedding is None:
        assert parts.mean is not None
        return (
            f"{start}features, lengths = torch.randn(50, 2, {len(parts.mean)}), "
            "torch.tensor([50, 30])  # padded (T, B, F)\n"
            "log_posteriors = model(features, lengths)  # (T, B, states)\n"
        )
    size = f"{rnn.layers * rnn.directions}, 2, {rnn.hidden}"
    return (
        f"{start}state = [torch.zeros({size})] * {rnn.states}\n"
        "tokens = torch.zeros(5, 2, dtype=torch.long)  # ids (T, B): vocabulary.json in the file\n"
        "logits, *state = model(tokens, *state)  # (T, B, symbols)\n"
    )
