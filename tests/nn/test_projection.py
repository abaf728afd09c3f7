"""``proj_size`` with a norm: the reference's numbers, torch's when it folds."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import normrnn
from tests.helpers import NORMS, check_against_reference, randomise

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def make(norm: Any, **options: Any) -> Any:
    layer = normrnn.LSTM(3, 4, proj_size=2, dtype=torch.float64, **{**NORMS[norm], **options})
    randomise(layer)
    return layer


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_against_the_reference(norm: Any, bidirectional: bool, training: bool) -> None:
    layer = make(norm, num_layers=2, bidirectional=bidirectional).train(training)
    check_against_reference(layer, [5, 5, 5], "dense")
    check_against_reference(layer, [2, 5, 3], "padded", T=6, with_state=False)
    check_against_reference(layer, [5, 3, 3], "sorted")
    check_against_reference(layer, [2, 5, 3], "padded", resets=torch.rand(5, 3) < 0.3)


@pytest.mark.parametrize("norm", ["layer"])
def test_with_a_normalised_cell(norm: Any) -> None:
    check_against_reference(make(norm, cell_norm=True), [2, 5, 3], "padded")


@pytest.mark.parametrize("norm", ["sequence", "frame", "hidden-shared", "none"])
def test_fold(norm: Any) -> None:
    layer = make(norm, num_layers=2, bidirectional=True).eval()
    folded = layer.fold()
    assert type(folded) is nn.LSTM
    assert folded.proj_size == 2
    x = torch.randn(6, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(folded(x), layer(x), rtol=1e-9, atol=1e-9)
    packed = pack_padded_sequence(x, torch.tensor([6, 4, 1]))
    torch.testing.assert_close(folded(packed)[0].data, layer(packed)[0].data, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", ["sequence", "frame"])
def test_convert(norm: Any) -> None:
    plain: Any = nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True, dtype=torch.float64)
    x = torch.randn(6, 3, 3, dtype=torch.float64)
    converted = normrnn.convert(plain, norm, batches=[x]).eval()
    assert isinstance(converted, normrnn.LSTM)
    torch.testing.assert_close(converted(x), plain(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(normrnn.fold(converted)(x), plain(x), rtol=1e-9, atol=1e-9)
