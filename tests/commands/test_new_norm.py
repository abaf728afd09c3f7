"""A normalisation of one's own, registered in ten lines, goes everywhere."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import normrnn
from normrnn import norms
from tests import toy_norm


@pytest.fixture
def toy() -> Iterator[norms.Norm]:
    yield norms.register(toy_norm.toy)
    del norms._TABLE["toy"]


@pytest.mark.usefixtures("toy")
def test_a_new_norm_is_a_layer() -> None:
    layer: Any = normrnn.LSTM(3, 2, num_layers=2, bidirectional=True, norm="toy", gamma=2.0)  # type: ignore[arg-type]
    assert isinstance(layer.norm_l1_reverse, toy_norm.RowScale)
    x = torch.randn(5, 4, 3)
    output, _ = layer(x, lengths=[5, 2, 3, 1])
    output.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    # By hand: what the gates of the first layer get, through torch's own LSTM.
    pre = x @ layer.weight_ih_l0.t()
    pre = pre / (pre.square().mean(2, keepdim=True) + 1e-5).sqrt() * 2
    plain: Any = torch.nn.LSTM(8, 2, bias=False)
    with torch.no_grad():
        plain.weight_ih_l0.copy_(torch.eye(8))
        plain.weight_hh_l0.copy_(layer.weight_hh_l0)
    small = normrnn.LSTM(3, 2, norm="toy", gamma=2.0)  # type: ignore[arg-type]
    small.load_state_dict({k: v for k, v in layer.state_dict().items() if k in small.state_dict()})
    torch.testing.assert_close(small(x)[0], plain(pre)[0])
    with pytest.raises(ValueError, match=r"choose one of 'sequence'.*'toy', None"):
        normrnn.LSTM(3, 2, norm="toys")  # type: ignore[arg-type]
