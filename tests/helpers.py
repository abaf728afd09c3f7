"""What the tests of ops and nn share: random layers, the reference beside them, comparison."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import normrnn
from normrnn import norms
from tests import reference

CELLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tanh": (normrnn.RNN, {"nonlinearity": "tanh"}),
    "relu": (normrnn.RNN, {"nonlinearity": "relu"}),
    "lstm": (normrnn.LSTM, {}),
    "lstm-output": (normrnn.LSTM, {"peephole": "output"}),
    "lstm-all": (normrnn.LSTM, {"peephole": "all"}),
    "gru": (normrnn.GRU, {}),
    "ligru": (normrnn.LiGRU, {}),
}

NORMS: dict[str, dict[str, Any]] = {
    "sequence": {"norm": "sequence"},
    "frame": {"norm": "frame"},
    "frame-slots": {"norm": "frame", "time_steps": 3},
    "hidden": {"norm": "hidden", "time_steps": 3},
    "hidden-shared": {"norm": "hidden"},
    "layer": {"norm": "layer"},
    "rms": {"norm": "rms"},
    "recurrent": {"norm": "recurrent", "time_steps": 3},
    "recurrent-shared": {"norm": "recurrent", "cell_norm": False},
    "whiten": {"norm": "whiten", "shrinkage": 0.2},
    "none": {"norm": None},
}
STATISTICAL = [name for name, how in NORMS.items() if norms.get(how["norm"]).keeps_statistics]
"""Those that keep statistics for test time."""

INPUT, HIDDEN = 3, 2


def build(cell: str, norm: str, *, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A layer whose γ, β and buffers are as random as its weights; slot 1 has seen nothing."""
    make, own = CELLS[cell]
    layer = make(INPUT, HIDDEN, dtype=dtype, **{**own, **NORMS[norm], **options})
    randomise(layer)
    return layer


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.uniform_(-1, 1)
        if name.endswith(("norm.weight", "weight")) and parameter.dim() == 1:
            parameter.abs_().add_(0.5)
    for name, buffer in model.named_buffers():
        if "running_mean" in name:
            buffer.uniform_(-1, 1)
        elif "running_cov" in name:
            buffer.uniform_(-1, 1)
            buffer.copy_(buffer @ buffer.t() + torch.eye(len(buffer)))
        elif "running_var" in name:
            buffer.uniform_(0.5, 2)
        elif buffer.dim() == 1:
            buffer.copy_(torch.tensor([2, 0, 1, 3, 0, 1][: len(buffer)]))
        else:
            buffer.fill_(3)


class Tagger(nn.Module):
    """A model whose ``forward`` hands lengths and resets to its layer."""

    def __init__(self, lstm: Any) -> None:
        super().__init__()
        self.lstm, self.head = lstm, nn.Linear(lstm.hidden_size, 3)

    def forward(self, x: Tensor, lengths: Any = None, resets: Any = None) -> Tensor:
        more = {"lengths": lengths, "resets": resets}
        more = {name: value for name, value in more.items() if value is not None}
        return self.head(self.lstm(x, **more)[0])


def settings_of(layer: Any, batch_statistics: bool | None = None) -> reference.Settings:
    cell = {"RNN_TANH": "tanh", "RNN_RELU": "relu", "LSTM": "lstm", "GRU": "gru", "LIGRU": "ligru"}[
        layer.mode
    ]
    normalisers = layer.normalisers()
    return reference.Settings(
        cell=cell,  # type: ignore[arg-type]
        norm=layer.norm,
        num_layers=layer.num_layers,
        bidirectional=layer.bidirectional,
        batch_statistics=layer.training if batch_statistics is None else batch_statistics,
        eps=normalisers[0].eps if normalisers else 1e-5,
        momentum=getattr(normalisers[0], "momentum", 0.1) if normalisers else 0.1,
        shrinkage=getattr(normalisers[0], "shrinkage", 0.0) if normalisers else 0.0,
        zoneout=(0.0, 0.0) if layer.training else layer.zoneout,
        cell_norm=bool(normalisers) and getattr(normalisers[0], "cell_norm", False),
    )


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """Copies of parameters (leaves that require a gradient) and buffers, by name, in float64."""
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    floating = [(n, t) for n, t in tensors if t.is_floating_point()]
    copies = {n: t.detach().to(torch.float64, copy=True) for n, t in floating}
    for name, _ in layer.named_parameters():
        copies[name].requires_grad_()
    return copies | {n: t.clone() for n, t in tensors if not t.is_floating_point()}


def inputs(T: int, lengths: Sequence[int], layer: Any = None) -> Tensor:
    """(T, B, I) of the layer's type and size, padded with NaN."""
    size, dtype = (layer.input_size, layer.weight_hh_l0.dtype) if layer else (INPUT, torch.float64)
    x = torch.randn(T, len(lengths), size, dtype=dtype)
    for b, n in enumerate(lengths):
        x[n:, b] = float("nan")
    return x.requires_grad_()


def states(layer: Any, batch: int) -> tuple[Tensor, Tensor]:
    shape = layer.num_layers * (2 if layer.bidirectional else 1), batch
    sizes = layer.proj_size or layer.hidden_size, layer.hidden_size
    h, c = (torch.randn(*shape, n).to(layer.weight_hh_l0.dtype).requires_grad_() for n in sizes)
    return h, c


def run(
    layer: Any,
    x: Tensor,
    lengths: Sequence[int],
    form: str,
    state: tuple[Tensor, Tensor] | None,
    resets: Tensor | None = None,
    reset_to: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """The layer on a padded (T, B, I) given in some form: padded (T, B, D·H), h and (LSTM) c."""
    hx, to = (s and (s if layer.mode == "LSTM" else s[0]) for s in (state, reset_to))
    if reset_to is not None:
        if form == "unbatched":
            to = _each(to, lambda s: s.squeeze(1))
        layer = partial(layer, reset_to=to)
    T, more = x.shape[0], {} if resets is None else {"resets": resets}
    if form == "dense":
        output, final = layer(x, hx, **more)
    elif form == "padded":
        output, final = layer(x, hx, lengths=lengths, **more)
    elif form == "batch_first":
        more = {name: value.t() for name, value in more.items()}
        output, final = layer(x.transpose(0, 1), hx, lengths=torch.tensor(lengths), **more)
        output = output.transpose(0, 1)
    elif form == "unbatched":
        hx = None if hx is None else _each(hx, lambda s: s.squeeze(1))
        more = {name: value.squeeze(1) for name, value in more.items()}
        output, final = layer(x.squeeze(1), hx, **more)
        output, final = output.unsqueeze(1), _each(final, lambda s: s.unsqueeze(1))
    else:
        packed, *others = (
            pack_padded_sequence(v, torch.tensor(lengths), enforce_sorted=form == "sorted")
            for v in (x, *more.values())
        )
        output, final = layer(packed, hx, **dict(zip(more, others, strict=True)))
        assert isinstance(output, PackedSequence)
        output, seen = pad_packed_sequence(output, total_length=T)
        assert seen.tolist() == list(lengths)
    return (output, *(final if isinstance(final, tuple) else (final,)))


def _each(hx: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return tuple(map(change, hx)) if isinstance(hx, tuple) else change(hx)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copies of those that there are."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.named_buffers()}


def reloaded(value: Any, weights_only: bool = True) -> Any:
    """What torch.load returns after torch.save."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """No parameter and no buffer changes inside."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    yield
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0, equal_nan=True)


def pull(outputs: Iterable[Tensor]) -> None:
    """Backward from all outputs with fixed random cotangents."""
    generator = torch.Generator().manual_seed(7)
    loss = sum(
        (out.double() * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum()
        for out in outputs
    )
    assert isinstance(loss, Tensor)
    loss.backward()


def same(actual: Any, expected: Any, tol: float = 0.0) -> None:
    torch.testing.assert_close(actual, expected, rtol=tol, atol=tol)


def close(actual: Tensor | None, expected: Tensor | None, what: str, tol: float = 1e-10) -> None:
    assert actual is not None, f"{what} is missing"
    assert expected is not None, f"{what} has no reference"
    torch.testing.assert_close(
        actual, expected, rtol=tol, atol=tol, msg=lambda message: f"{what}: {message}"
    )


def close_to_largest(actual: Tensor, expected: Tensor, what: str, tol: float) -> None:
    """Within ``tol`` of the largest entry, for numbers in float32."""
    scale = expected.abs().max().clamp(min=1).item() if expected.numel() else 1.0
    close(actual.double() / scale, expected.double() / scale, what, tol)


def _learned_state(
    layer: Any, own: Mapping[str, Tensor], lengths: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """The state that `learn_initial_state` trains, for the reference; None: zeros."""
    if not layer.learn_initial_state:
        return None
    parts = {n: [p for name, p in own.items() if name.startswith(n)] for n in ("h_0", "c_0")}
    h, c = (torch.stack(parts[n] or parts["h_0"]) for n in ("h_0", "c_0"))
    return h[:, None].expand(-1, len(lengths), -1), c[:, None].expand(-1, len(lengths), -1)


def check_against_reference(
    layer: Any,
    lengths: Sequence[int],
    form: str,
    *,
    T: int | None = None,
    with_state: bool = True,
    batch_statistics: bool | None = None,
    resets: Tensor | None = None,
    reset_to: int = 0,
    constant: Sequence[int] = (),
    tol: float = 1e-10,
) -> None:
    """Outputs, final states, every gradient and every buffer; NaN in the padding.

    The reference computes in float64, from the numbers of the layer, which may be in float32.

    Args:
        reset_to: of how many sequences the state is that resets start from; 0: none is given.
        constant: time steps at which all sequences have the same frame.
    """
    T = max(lengths) if T is None else T
    layer.zero_grad()
    x = inputs(T, lengths, layer)
    with torch.no_grad():
        for t in constant:
            x[t] = torch.where(x[t].isnan(), x[t], torch.linspace(-0.7, 1.1, x.shape[2]).to(x))
    state = states(layer, len(lengths)) if with_state else None
    to = states(layer, reset_to) if reset_to else None
    own, given = tensors_of(layer), (x, *(state or ()), *(to or ()))
    outputs = run(layer, x, lengths, form, state, resets, to)
    pull(outputs)
    copies = [v.detach().double().clone().requires_grad_() for v in given]
    learned = _learned_state(layer, own, lengths)
    their_state = (copies[1], copies[2]) if with_state else learned
    their_to = (copies[-2], copies[-1]) if to else learned
    how = settings_of(layer, batch_statistics)
    result = reference.stack(copies[0], lengths, own, how, their_state, resets, their_to)
    expected = (result.output, result.h, result.c)[: len(outputs)]
    pull(expected)

    pairs: dict[str, Any] = {"output": (outputs[0], expected[0])}
    pairs |= {f"final state {k}": (outputs[k], expected[k]) for k in range(1, len(outputs))}
    leaves = ["input", *(["h_0", "c_0"] if state else []), *(["reset h", "reset c"] if to else [])]
    for name, a, e in zip(leaves, given, copies, strict=True):
        if layer.mode == "LSTM" or not name.endswith(("c_0", " c")):
            pairs[f"gradient of {name}"] = a.grad, e.grad
    for name, parameter in layer.named_parameters():
        is_unused = name.startswith(("h_0", "c_0")) and own[name].grad is None
        if not is_unused or parameter.grad is not None:
            pairs[f"gradient of {name}"] = parameter.grad, own[name].grad
    is_updated = how.batch_statistics and batch_statistics is None
    buffers = result.buffers if is_updated else own
    pairs |= {name: (b, buffers[name]) for name, b in layer.named_buffers()}
    for name, (actual, wanted) in pairs.items():
        assert actual is not None, f"{name} is missing"
        assert wanted is not None, f"{name} has no reference"
        if actual.dtype == torch.float32:
            close_to_largest(actual, wanted, name, max(tol, 1e-4))
        else:
            close(actual, wanted, name, tol if is_updated or name not in own else 0.0)
    for b, n in enumerate(lengths):
        for padding in (outputs[0][n:, b], pairs["gradient of input"][0][n:, b]):
            assert torch.equal(padding, torch.zeros_like(padding))
