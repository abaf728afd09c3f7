"""What the tests of ops and nn share: random layers, the reference beside them, comparison."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pad_packed_sequence,
)

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
def randomise(model: torch.nn.Module) -> None:
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
        cell_norm=bool(normalisers) and getattr(normalisers[0], "cell_norm", False),
    )


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """Copies of parameters (leaves that want a gradient) and buffers, by name."""
    parameters = {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}
    return parameters | {n: b.clone() for n, b in layer.named_buffers()}


def inputs(T: int, lengths: Sequence[int], padding: float = float("nan")) -> Tensor:
    """(T, B, I) whose padding holds ``padding``."""
    x = torch.randn(T, len(lengths), INPUT, dtype=torch.float64)
    for b, n in enumerate(lengths):
        x[n:, b] = padding
    return x.requires_grad_()


def states(layer: Any, batch: int) -> tuple[Tensor, Tensor]:
    shape = layer.num_layers * (2 if layer.bidirectional else 1), batch
    sizes = layer.proj_size or layer.hidden_size, layer.hidden_size
    h, c = (torch.randn(*shape, n, dtype=torch.float64).requires_grad_() for n in sizes)
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
            to = _squeezed(to)
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
        hx = None if hx is None else _squeezed(hx)
        more = {name: value.squeeze(1) for name, value in more.items()}
        output, final = layer(x.squeeze(1), hx, **more)
        output, final = output.unsqueeze(1), _unsqueezed(final)
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


def _squeezed(hx: Any) -> Any:
    return tuple(s.squeeze(1) for s in hx) if isinstance(hx, tuple) else hx.squeeze(1)


def _unsqueezed(hx: Any) -> Any:
    return tuple(s.unsqueeze(1) for s in hx) if isinstance(hx, tuple) else hx.unsqueeze(1)


def pull(outputs: Iterable[Tensor]) -> None:
    """Backward from all outputs with fixed random cotangents."""
    generator = torch.Generator().manual_seed(7)
    loss = sum(
        (out * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum()
        for out in outputs
    )
    assert isinstance(loss, Tensor)
    loss.backward()


def close(actual: Tensor | None, expected: Tensor | None, what: str, tol: float = 1e-10) -> None:
    assert actual is not None, f"{what} is missing"
    assert expected is not None, f"{what} has no reference"
    torch.testing.assert_close(
        actual, expected, rtol=tol, atol=tol, msg=lambda message: f"{what}: {message}"
    )


def same_mapping(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tol: float = 1e-10
) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        close(actual[name], value, name, tol)


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

    Args:
        reset_to: of how many sequences the state is that resets start from; 0: none is given.
        constant: time steps at which all sequences have the same frame.
    """
    T = max(lengths) if T is None else T
    layer.zero_grad()
    x = inputs(T, lengths)
    with torch.no_grad():
        for t in constant:
            x[t] = torch.where(x[t].isnan(), x[t], torch.tensor([0.3, -0.7, 1.1]).to(x))
    state = states(layer, len(lengths)) if with_state else None
    own = tensors_of(layer)
    to = states(layer, reset_to) if reset_to else None
    outputs = run(layer, x, lengths, form, state, resets, to)
    pull(outputs)
    copies = [v.detach().clone().requires_grad_() for v in (x, *(state or ()), *(to or ()))]
    their_state = (copies[1], copies[2]) if with_state else _learned_state(layer, own, lengths)
    their_to = (copies[-2], copies[-1]) if to else _learned_state(layer, own, lengths)
    how = settings_of(layer, batch_statistics)
    result = reference.stack(copies[0], lengths, own, how, their_state, resets, their_to)
    expected = (result.output, result.h, result.c)[: len(outputs)]
    pull(expected)

    for name, a, e in zip(("output", "h_n", "c_n"), outputs, expected, strict=False):
        close(a, e, name, tol)
    for b, n in enumerate(lengths):
        assert torch.equal(outputs[0][n:, b], torch.zeros_like(outputs[0][n:, b]))
        assert x.grad is not None
        assert torch.equal(x.grad[n:, b], torch.zeros_like(x.grad[n:, b]))
    close(x.grad, copies[0].grad, "gradient of the input", tol)
    if state is not None:
        close(state[0].grad, copies[1].grad, "gradient of h_0", tol)
        if layer.mode == "LSTM":
            close(state[1].grad, copies[2].grad, "gradient of c_0", tol)
    if to is not None:
        close(to[0].grad, copies[-2].grad, "gradient of the h of a reset", tol)
        if layer.mode == "LSTM":
            close(to[1].grad, copies[-1].grad, "gradient of the c of a reset", tol)
    for name, parameter in layer.named_parameters():
        close(parameter.grad, own[name].grad, f"gradient of {name}", tol)
    if how.batch_statistics and batch_statistics is None:
        same_mapping(dict(layer.named_buffers()), result.buffers, tol)
    else:
        before = {n: own[n] for n, _ in layer.named_buffers()}
        same_mapping(dict(layer.named_buffers()), before, 0.0)
