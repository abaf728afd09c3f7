"""Cells: one step of the layer, row by row."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import normrnn
from tests.helpers import gradients, randomise, reloaded

X: Any = {"dtype": torch.float64}
KINDS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "tanh": (normrnn.RNNCell, normrnn.RNN, nn.RNNCell, {}),
    "relu": (normrnn.RNNCell, normrnn.RNN, nn.RNNCell, {"nonlinearity": "relu"}),
    "lstm": (normrnn.LSTMCell, normrnn.LSTM, nn.LSTMCell, {}),
    "gru": (normrnn.GRUCell, normrnn.GRU, nn.GRUCell, {}),
}


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"affine": False}, {"cell_norm": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_step_by_step_it_is_the_layer(kind: str, options: dict[str, Any]) -> None:
    """Outputs, states and every gradient; the cell's names are the layer's without "_l0"."""
    make, layer_of, _, own = KINDS[kind]
    if "cell_norm" in options and kind != "lstm":
        options = {"eps": 0.1}
    layer = layer_of(3, 4, norm="layer", **X, **own, **options)
    randomise(layer)
    cell = make(3, 4, **X, **own, **options)
    cell.load_state_dict({k.replace("_l0", ""): v for k, v in layer.state_dict().items()})
    for shape in ((2,), ()):  # a batch, and unbatched
        x, h, c = torch.randn(5, *shape, 3, **X), *torch.randn(2, *shape, 4, **X)
        state: Any = (h, c) if kind == "lstm" else h
        found = []
        for frame in x:
            state = cell(frame, state)
            found.append(state[0] if kind == "lstm" else state)
        output, final = layer(x, (h[None], c[None]) if kind == "lstm" else h[None])
        torch.testing.assert_close(torch.stack(found), output)
        last = tuple(s[None] for s in state) if kind == "lstm" else state[None]
        torch.testing.assert_close(last, final)
        torch.stack(found).square().sum().backward()
        output.square().sum().backward()
    grads = {name.replace("_l0", ""): grad for name, grad in gradients(layer).items()}
    torch.testing.assert_close(gradients(cell), grads)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_norm_it_is_torchs(kind: str) -> None:
    make, _, torchs, own = KINDS[kind]
    torch.manual_seed(3)
    mine = make(3, 4, norm=None, **own)
    torch.manual_seed(3)
    theirs = torchs(3, 4, **own)
    assert isinstance(mine, torchs)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    x = torch.randn(2, 3)
    torch.testing.assert_close(mine(x), theirs(x), rtol=0, atol=0)
    torch.testing.assert_close(mine(x[0]), theirs(x[0]), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_files_and_reset(kind: str) -> None:
    make, _, _, own = KINDS[kind]
    cell, x = make(3, 4, gamma=0.3, **own), torch.randn(2, 3)
    for twin in (copy.deepcopy(cell), reloaded(cell)):
        torch.testing.assert_close(twin(x), cell(x), rtol=0, atol=0)
    cell.reset_parameters()
    assert torch.equal(cell.norm.weight, torch.full_like(cell.norm.weight, 0.3))
    assert cell.weight_ih.abs().max() <= 0.5
    assert repr(cell).startswith(f"{type(cell).__name__}(\n  3, 4")
    assert "norm=None" in repr(make(3, 4, norm=None))


@pytest.mark.parametrize("norm", ["layer", None])
@pytest.mark.parametrize("kind", ["RNNCell", "LSTMCell", "GRUCell"])
def test_bias_and_sizes_as_torch_takes_them(kind: str, norm: Any) -> None:
    ours, theirs = getattr(normrnn, kind), getattr(nn, kind)
    for bias in (1, 0, None):
        assert len([*ours(3, 2, bias=bias, norm=None).parameters()]) == len(
            [*theirs(3, 2, bias=bias).parameters()]
        )
        assert ours(3, 2, bias=bias, norm=norm).bias is bool(bias)
    x = torch.randn(4, 3)
    empty, wanted = ours(3, 0, norm=norm)(x), theirs(3, 0)(x)
    assert [len(s) for s in empty] == [len(s) for s in wanted]
