"""The acoustic model against torch's own layers, its initialisation and its priors."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from normrnn.speech.task import AcousticModel


def _utterances(dim: int = 3) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    lengths = (9, 6, 6, 2)
    return [torch.randn(n, dim) * 2 + 5 for n in lengths], [
        torch.randint(0, 5, (n,)) for n in lengths
    ]


def test_baseline_is_torchs_lstm_utterance_by_utterance() -> None:
    model = AcousticModel(3, 5, hidden=4, layers=2)
    model.mean.fill_(5.0)
    model.variance.fill_(4.0)
    plain = nn.LSTM(3, 4, 2, bidirectional=True)
    plain.load_state_dict(model.rnn.state_dict())
    features, labels = _utterances()
    outputs = [model.decoder(plain((x - 5) / 2)[0]) for x in features]
    logits, truth = torch.cat(outputs), torch.cat(labels)
    expected = F.cross_entropy(logits, truth, reduction="sum")
    wrong = int((logits.argmax(1) != truth).sum())
    weights = [p for p in model.parameters() if p.requires_grad]
    loss = model.loss(pack_sequence(features), pack_sequence(labels).data)
    assert loss.errors is not None
    assert int(loss.errors) == wrong
    torch.testing.assert_close(loss.total, expected)
    loss.total.backward()
    expected.backward()
    torch.testing.assert_close(model.rnn.weight_hh_l1_reverse.grad, plain.weight_hh_l1_reverse.grad)
    torch.testing.assert_close(model.rnn.bias_ih_l0.grad, plain.bias_ih_l0.grad)
    assert all(p.grad is not None for p in weights)


@pytest.mark.parametrize("cell", ["lstm", "ligru"])
def test_constant_feature_stays_finite(cell: Any) -> None:
    model = AcousticModel(3, 5, hidden=4, layers=1, norm="sequence", cell=cell)
    model.mean.fill_(5.0)
    model.variance[1] = 0.0
    x = torch.randn(8, 3)
    x[:, 1] = 5.0
    assert model(pack_sequence([x, x])).isfinite().all()


@pytest.mark.parametrize("norm", [None, "sequence"])
def test_glorot_per_gate_and_zero_biases(norm) -> None:
    model = AcousticModel(123, 50, hidden=250, layers=2, norm=norm, peephole="output")
    bounds = {
        "weight_ih_l0": math.sqrt(6 / (123 + 250)),
        "weight_ih_l1_reverse": math.sqrt(6 / (500 + 250)),  # stacked: 0.063
        "weight_hh_l1": math.sqrt(6 / 500),
        "weight_co_l0": math.sqrt(6 / 500),
    }
    parameters = dict(model.rnn.named_parameters())
    for name, bound in bounds.items():
        top = parameters[name].abs().max().item()
        assert 0.97 * bound < top <= bound, name
    decoder = model.decoder.weight.abs().max().item()
    assert 0.97 * math.sqrt(6 / 550) < decoder <= math.sqrt(6 / 550)
    biases = [p for n, p in model.named_parameters() if "bias" in n]
    assert biases
    assert all(not p.any() for p in biases)
    gammas = [p for n, p in parameters.items() if n.startswith("norm") and n.endswith("weight")]
    assert len(gammas) == (4 if norm else 0)
    assert all((g == 1).all() for g in gammas)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert all("bias_hh" in n for n in frozen)
    assert len(frozen) == (0 if norm else 4)


def test_log_posteriors_sum_to_one_and_priors_are_floored() -> None:
    model = AcousticModel(3, 4, hidden=4, layers=1).eval()
    model.label_counts.copy_(torch.tensor([6, 0, 3, 1]))
    posteriors = model.log_posteriors(torch.randn(7, 3))
    assert posteriors.shape == (7, 4)
    torch.testing.assert_close(posteriors.exp().sum(1), torch.ones(7))
    expected = [math.log(n / 11) for n in (6, 1, 3, 1)]
    torch.testing.assert_close(model.log_priors(), torch.tensor(expected))
    expected = [math.log(n / 14) for n in (6, 2.5, 3, 2.5)]
    torch.testing.assert_close(model.log_priors(2.5), torch.tensor(expected))
