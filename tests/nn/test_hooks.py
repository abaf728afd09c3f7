"""Hooks and parametrizations, as people hang them on torch's layers."""

from typing import Any

import pytest
import torch
from torch import nn

import normrnn


@pytest.mark.parametrize("globally", [False, True])
def test_what_a_hook_on_a_normaliser_keeps_stays_as_it_was(globally: bool) -> None:
    layer = normrnn.LSTM(3, 2, norm="sequence")
    (normaliser,) = layer.normalisers()
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(module: nn.Module, _: object, out: torch.Tensor) -> None:
        if module is normaliser:
            kept.append((out, out.clone()))

    register = nn.modules.module.register_module_forward_hook
    handle = register(keep) if globally else normaliser.register_forward_hook(keep)
    try:
        layer(torch.randn(5, 4, 3))
    finally:
        handle.remove()
    ((now, then),) = kept
    assert torch.equal(now, then)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("norm", ["sequence", "frame"])
def test_a_hook_on_a_normaliser_fires_once_in_every_call(
    norm: Any, dtype: torch.dtype, device: str
) -> None:
    layer = normrnn.LSTM(3, 2, norm=norm, dtype=dtype, device=device)
    layer(torch.randn(5, 4, 3, dtype=dtype, device=device))
    calls: list[Any] = []
    layer.normalisers()[0].register_forward_hook(lambda *_: calls.append(1))
    for training in (True, False):
        layer.train(training)
        for batch in (2, 40):
            layer(torch.randn(5, batch, 3, dtype=dtype, device=device))
    assert len(calls) == 4


@pytest.mark.parametrize("norm", ["sequence", None])
def test_parametrized_layers_are_reset_and_folded(norm: Any) -> None:
    layer = normrnn.LSTM(3, 2, norm=norm)
    nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    before = layer.weight_hh_l0.clone()
    layer.reset_parameters()
    x = torch.randn(5, 4, 3)
    layer(x)
    layer.eval()
    plain = layer.fold()
    assert type(plain) is nn.LSTM
    torch.testing.assert_close(plain(x)[0], layer(x)[0])
    assert not torch.equal(layer.weight_hh_l0, before)
