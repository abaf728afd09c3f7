"""Statistics that count padding are those of a padded batch, and nothing else is padded."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_sequence

import normrnn
from normrnn.errors import UsageError
from normrnn.speech.config import AcousticConfig, SpeechConfig
from normrnn.speech.padding import count_padding
from normrnn.speech.task import SpeechTask

LENGTHS = (6, 4, 4, 1)


def sequences() -> list[Tensor]:
    return [torch.randn(n, 3, dtype=torch.float64) + 1 for n in LENGTHS]


def relu(**options: Any) -> Any:
    """relu(γ BN(W_x x) + β): no recurrence."""
    layer: Any = normrnn.RNN(3, 2, nonlinearity="relu", dtype=torch.float64, **options)
    with torch.no_grad():
        layer.weight_hh_l0.zero_()
        layer.norm_l0.bias.fill_(0.3)
    count_padding(layer)
    return layer


@pytest.mark.parametrize("norm", ["sequence", "frame"])
def test_by_hand(norm: str) -> None:
    layer, x = relu(norm=norm, momentum=1.0), sequences()
    output, _ = layer(pack_sequence(x))
    padded = pad_sequence(x) @ layer.weight_ih_l0.t()  # (6, 4, 2), zeros behind the shorter
    dims = (0, 1) if norm == "sequence" else (1,)
    mean = padded.mean(dims, keepdim=True)
    var = ((padded - mean) ** 2).mean(dims, keepdim=True)
    expected = ((padded - mean) / (var + 1e-5).sqrt() + 0.3).relu()
    found, _ = torch.nn.utils.rnn.pad_packed_sequence(output)
    for b, n in enumerate(LENGTHS):
        torch.testing.assert_close(found[:n, b], expected[:n, b])
        assert not found[n:, b].any()
    flat = padded.flatten(0, 1)
    torch.testing.assert_close(layer.norm_l0.running_mean, flat.mean(0))
    torch.testing.assert_close(layer.norm_l0.running_var, flat.var(0))
    normrnn.recalibrate(layer, [pack_sequence(x)])
    torch.testing.assert_close(layer.norm_l0.running_mean, flat.mean(0))


def test_it_is_a_setting_of_the_model() -> None:
    """Equal lengths have no padding; others make a difference, also to gradients."""
    config = SpeechConfig(
        recipe="librispeech-mini", norm="sequence", model=AcousticConfig(hidden=4, layers=2)
    )
    counting = replace(config, model=replace(config.model, count_padding=True))
    torch.manual_seed(1)
    model = SpeechTask.network(config, dim=3, classes=5)
    torch.manual_seed(1)
    other = SpeechTask.network(counting, dim=3, classes=5)
    even, ragged = ([torch.randn(n, 3) + 2 for n in some] for some in ((5, 5, 5), (9, 5, 2)))
    torch.testing.assert_close(model(pack_sequence(even)), other(pack_sequence(even)))
    a, b = (m(pack_sequence(ragged)) for m in (model, other))
    assert (a - b).abs().max() > 1e-3
    b.sum().backward()
    assert all(p.grad.isfinite().all() for p in other.parameters() if p.grad is not None)
    assert model.state_dict().keys() == other.state_dict().keys()
    with pytest.raises(UsageError, match="count_padding is for norm sequence or frame, not layer"):
        replace(counting, norm="layer")
    assert replace(counting, norm="none").model.count_padding  # the arm beside it
