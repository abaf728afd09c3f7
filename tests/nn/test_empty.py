"""Batches with sequences of no frames, of nothing but those, and of no sequences."""

from typing import Any

import pytest
import torch
from torch import nn

import normrnn
from tests.helpers import CELLS, NORMS, build, close, inputs, pull, run, states

PAIRS = [(normrnn.RNN, nn.RNN), (normrnn.LSTM, nn.LSTM), (normrnn.GRU, nn.GRU)]
LENGTHS = [2, 0, 5, 0, 3]
FULL = [0, 2, 4]
"""Those with frames."""


def buffers(layer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in layer.named_buffers()}


@pytest.mark.matrix(8)
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", CELLS)
def test_a_sequence_of_length_0(
    cell: str, norm: str, batch_first: bool, bidirectional: bool, resets: bool
) -> None:
    """Zeros, and its initial state; the others as if it were not there, gradients included."""
    how: dict[str, Any] = {"num_layers": 2, "bidirectional": bidirectional}
    layer = build(cell, norm, batch_first=batch_first, **how)
    twin = build(cell, norm, batch_first=batch_first, **how)
    twin.load_state_dict(layer.state_dict())
    form = "batch_first" if batch_first else "padded"
    x, state = inputs(6, LENGTHS), states(layer, 5)
    cut = torch.rand(6, 5) < 0.3 if resets else None
    output, *final = run(layer, x, LENGTHS, form, state, cut)
    few = [v.detach()[:, FULL].requires_grad_() for v in (x, *state)]
    fewer = None if cut is None else cut[:, FULL]
    wanted, *last = run(twin, few[0], [2, 5, 3], form, (few[1], few[2]), fewer)
    close(output[:, FULL], wanted, "output", 1e-12)
    assert torch.equal(output[:, [1, 3]], torch.zeros_like(output[:, [1, 3]]))
    for mine, theirs, start in zip(final, last, state, strict=False):
        close(mine[:, FULL], theirs, "final state", 1e-12)
        assert torch.equal(mine[:, [1, 3]], start[:, [1, 3]])
    for name, buffer in layer.named_buffers():
        close(buffer, dict(twin.named_buffers())[name], name, 1e-12)
    pull([output[:, FULL], *(f[:, FULL] for f in final)])
    pull([wanted, *last])
    assert x.grad is not None
    close(x.grad[:, FULL], few[0].grad, "gradient of the input")
    assert torch.equal(x.grad[:, [1, 3]], torch.zeros_like(x.grad[:, [1, 3]]))
    for name, parameter in layer.named_parameters():
        close(parameter.grad, dict(twin.named_parameters())[name].grad, name)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("T", [4, 0])
def test_nothing_but_sequences_of_length_0(cell: str, norm: str, T: int) -> None:
    layer = build(cell, norm, num_layers=2, bidirectional=True)
    before, state = buffers(layer), states(layer, 3)
    x = torch.full((T, 3, 3), float("nan"), dtype=torch.float64)
    output, *final = run(layer, x, [0, 0, 0], "padded", state)
    assert torch.equal(output, torch.zeros(T, 3, 4, dtype=torch.float64))
    assert all(torch.equal(a, b) for a, b in zip(final, state, strict=False))
    assert all(torch.equal(v, before[k]) for k, v in layer.named_buffers())
    (output.sum() + 1).backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


@pytest.mark.matrix(3)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_a_batch_of_no_sequences(ours: Any, torchs: Any, norm: str, training: bool) -> None:
    """Empty output as torch's, nothing updated, and a loss of it has gradients: zeros."""
    layer = ours(3, 2, 2, bidirectional=True, **NORMS[norm]).train(training)
    plain, x = torchs(3, 2, 2, bidirectional=True), torch.zeros(5, 0, 3)
    before = buffers(layer)
    for more in ({}, {"lengths": []}, {"resets": torch.zeros(5, 0, dtype=torch.bool)}):
        (output, final), (wanted, last) = layer(x, **more), plain(x)
        assert output.shape == wanted.shape
        final, last = (s if isinstance(s, tuple) else (s,) for s in (final, last))
        assert [s.shape for s in final] == [s.shape for s in last]
        output.sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
    assert all(torch.equal(v, before[k]) for k, v in layer.named_buffers())
