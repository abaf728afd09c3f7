"""Zaremba's network: what is initialised how, where dropout falls, what it computes."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normrnn.text.task import LanguageModel


@pytest.mark.parametrize("norm", [None, "frame", "sequence"])
def test_initialisation(norm) -> None:
    model = LanguageModel(50, 16, 2, norm=norm, init=0.04)
    biases = [p for n, p in model.named_parameters() if "bias" in n and p.requires_grad]
    assert sum(p.numel() for p in biases) == 2 * 4 * 16 + 50  # one trained bias per gate
    for name, parameter in model.named_parameters():
        if "norm_l" in name:
            expected = 1.0 if name.endswith("weight") else 0.0
            assert torch.equal(parameter, torch.full_like(parameter, expected)), name
        elif "bias_hh" in name:
            assert not parameter.requires_grad
            assert torch.equal(parameter, torch.zeros_like(parameter))
        else:
            assert parameter.requires_grad
            assert parameter.abs().max() <= 0.04
            assert parameter.abs().max() > 0.03
            assert parameter.min() < 0 < parameter.max()


@pytest.mark.parametrize("kind", ["element", "locked"])
def test_dropout_between_all_layers_and_nowhere_else(kind) -> None:
    """On the embedding, between the layers and before the softmax; locked: one mask a sequence."""
    options: Any = {"dropout_kind": kind, "weight_drop": 0.2, "zoneout": (0.1, 0.2)}
    model = LanguageModel(50, 16, 2, dropout=0.5, **options)
    assert {name: getattr(model.rnn, name) for name in options} == options
    assert model.rnn.dropout == 0.5
    assert LanguageModel(50, 16, 1, dropout=0.5).rnn.dropout == 0  # nothing between: no warning
    kept: list[torch.Tensor] = []
    model.dropout.register_forward_hook(lambda _m, given, out: kept.append(out / given[0]))
    with torch.no_grad():  # no embedding and no state is 0 by itself
        model.embedding.weight.add_(1)
    tokens, state = torch.randint(0, 50, (30, 8)), (torch.ones(2, 8, 16), torch.ones(2, 8, 16))
    model(tokens, state)
    embedding, before_softmax = (mask == 0 for mask in kept)
    for dropped in (embedding, before_softmax):
        assert 0.3 < dropped.float().mean() < 0.7
        assert torch.equal(dropped, dropped[:1].expand_as(dropped)) == (kind == "locked")
    assert not torch.equal(embedding[0], before_softmax[0])
    model.eval()(tokens, state)
    torch.testing.assert_close(kept[2], torch.ones_like(kept[2]))


@pytest.mark.parametrize("norm", [None, "frame"])
@pytest.mark.parametrize(("cell", "plain"), [("lstm", nn.LSTM), ("rnn", nn.RNN), ("gru", nn.GRU)])
def test_baseline_is_torchs_and_loss_is_the_cross_entropy_of_its_logits(cell, plain, norm) -> None:
    model = LanguageModel(20, 8, 2, cell=cell, norm=norm).double().eval()
    tokens, targets = torch.randint(0, 20, (2, 6, 3))
    start = tuple(torch.randn(1 + (cell == "lstm"), 2, 3, 8, dtype=torch.float64))
    logits, state = model(tokens, start)
    if norm is None:
        layer = plain(8, 8, 2).double()
        layer.load_state_dict(model.rnn.state_dict())
        output, after = layer(model.embedding(tokens), start if cell == "lstm" else start[0])
        torch.testing.assert_close(logits, model.decoder(output))
        torch.testing.assert_close(state, after if cell == "lstm" else (after,))
    loss = model.loss(tokens, targets, start)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss.total, expected)
    torch.testing.assert_close(loss.state, state)


@pytest.mark.parametrize("cell", ["lstm", "rnn", "gru"])
@pytest.mark.parametrize("norm", [None, "hidden"])
def test_glorot_initialisation(cell, norm) -> None:
    """The appendix: lookup table from N(0, 1), Glorot per gate, biases zero, γ and β alone."""
    torch.manual_seed(1)
    options = {"embedding": 40, "norm": norm, "time_steps": 7, "init": "glorot"}
    model = LanguageModel(50, 90, 2, cell=cell, **options)
    assert model.embedding.weight.std().item() == pytest.approx(1, abs=0.05)
    assert model.embedding.weight.abs().max() > 2.5
    sizes = {"rnn.weight_ih_l0": 40 + 90, "decoder.weight": 90 + 50}
    sizes |= dict.fromkeys(("rnn.weight_hh_l0", "rnn.weight_ih_l1", "rnn.weight_hh_l1"), 90 + 90)
    for name, parameter in model.named_parameters():
        if name in sizes:
            bound = math.sqrt(6 / sizes[name])
            assert 0.99 * bound < parameter.abs().max() <= bound, name
        elif name.endswith("weight") and "norm_l" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        elif name != "embedding.weight":
            assert torch.equal(parameter, torch.zeros_like(parameter)), name


def test_gru_trains_one_bias_of_r_and_z_and_both_of_the_candidate() -> None:
    model = LanguageModel(20, 8, 1, cell="gru")
    model(torch.randint(0, 20, (6, 3)))[0].sum().backward()
    rest = model.rnn.bias_hh_l0
    assert isinstance(rest, torch.Tensor)
    assert rest.grad is not None
    assert torch.equal(rest[:16], torch.zeros(16))
    assert torch.equal(rest.grad[:16], torch.zeros(16))
    assert (rest.grad[16:] != 0).all()


@pytest.mark.parametrize("norm", ["frame", "layer", None])
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_loss_under_autocast(cell: Any, norm: str | None) -> None:
    """bfloat16 on a CPU: near the loss of float32, and every parameter learns."""
    torch.manual_seed(0)
    model = LanguageModel(11, hidden=8, cell=cell, norm=norm)
    tokens, targets = torch.randint(0, 11, (2, 5, 4))
    expected = model.loss(tokens, targets).total
    with torch.autocast("cpu", dtype=torch.bfloat16):
        nats = model.loss(tokens, targets).total
    nats.backward()
    assert nats.item() == pytest.approx(expected.item(), rel=0.02)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
