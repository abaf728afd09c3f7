"""Folding of recurrent batch normalisation, whitening, LiGRU and projections."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import normrnn
from tests.helpers import NORMS, STATISTICAL, build, close, randomise

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
X: Any = {"dtype": torch.float64}
SHARED = [norm for norm in STATISTICAL if "time_steps" not in NORMS[norm]]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", ["recurrent-shared", "whiten"])
@pytest.mark.parametrize("cell", ["tanh", "relu", "lstm", "gru"])
def test_both_are_folded_into_torchs_layer(cell: str, norm: str, bias: bool) -> None:
    how: Any = {"num_layers": 2, "bidirectional": True, "bias": bias, "dtype": torch.float32}
    layer = build(cell, norm, **how).eval()
    plain, x = layer.fold(), torch.randn(40, 5, 3)
    assert type(plain).__module__ == "torch.nn.modules.rnn"
    for rows in (x, x[:4]):  # by torch's kernel, and too few rows for it
        close(plain(rows)[0], layer(rows)[0], "folded", 1e-5)


@pytest.mark.parametrize("norm", SHARED)
def test_a_ligru_folds_to_one_without_a_norm(norm: str) -> None:
    layer = build("ligru", norm, num_layers=2, bidirectional=True).eval()
    x = torch.randn(5, 3, 3, **X)
    for plain in (layer.fold(), normrnn.fold(nn.Sequential(layer))[0]):  # type: ignore[index]
        assert type(plain) is normrnn.LiGRU
        assert plain.norm is None
        torch.testing.assert_close(plain(x)[0], layer(x)[0])
    with pytest.raises(ValueError, match="LiGRU"):
        normrnn.fold(layer, plain=True)


@pytest.mark.parametrize("norm", ["sequence", "frame", "hidden-shared", "none"])
def test_a_projection_folds(norm: str) -> None:
    how: Any = {"proj_size": 2, "num_layers": 2, "bidirectional": True}
    layer = normrnn.LSTM(3, 4, **how, **NORMS[norm], **X).eval()
    randomise(layer)
    folded, x = layer.fold(), torch.randn(6, 3, 3, **X)
    assert (type(folded), folded.proj_size) == (nn.LSTM, 2)
    torch.testing.assert_close(folded(x), layer(x), rtol=1e-9, atol=1e-9)
    packed = pack_padded_sequence(x, torch.tensor([6, 4, 1]))
    torch.testing.assert_close(folded(packed)[0].data, layer(packed)[0].data, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", ["sequence", "frame"])
def test_a_projection_is_converted(norm: Any) -> None:
    plain: Any = nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True, **X)
    x = torch.randn(6, 3, 3, **X)
    converted = normrnn.convert(plain, norm, batches=[x]).eval()
    for layer in (converted, normrnn.fold(converted)):
        torch.testing.assert_close(layer(x), plain(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("options", "reason"), [({}, "cell_norm=False"), ({"time_steps": 3}, "3")])
def test_recurrent_layers_that_do_not_fold(options: dict[str, Any], reason: str) -> None:
    layer = normrnn.GRU if options else normrnn.LSTM
    with pytest.raises(ValueError, match=reason):
        layer(3, 2, norm="recurrent", **options).fold()
