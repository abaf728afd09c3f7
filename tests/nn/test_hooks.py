"""Hooks and parametrizations, as people hang them on torch's layers."""

from typing import Any

import pytest
import torch
from torch import nn

import normrnn


@pytest.mark.parametrize("globally", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("norm", ["sequence", "frame"])
def test_a_hook_on_a_normaliser_fires_once_in_every_call(
    norm: Any, dtype: torch.dtype, device: str, globally: bool
) -> None:
    """And what it keeps stays as it was."""
    layer = normrnn.LSTM(3, 2, norm=norm, dtype=dtype, device=device)
    (normaliser,) = layer.normalisers()
    layer(torch.randn(5, 4, 3, dtype=dtype, device=device))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(module: nn.Module, _: object, out: torch.Tensor) -> None:
        if module is normaliser:
            kept.append((out, out.clone()))

    register = nn.modules.module.register_module_forward_hook
    handle = register(keep) if globally else normaliser.register_forward_hook(keep)
    try:
        for training in (True, False):
            layer.train(training)
            for batch in (2, 40):
                layer(torch.randn(5, batch, 3, dtype=dtype, device=device))
    finally:
        handle.remove()
    assert len(kept) == 4
    assert device == "meta" or all(torch.equal(now, then) for now, then in kept)


@pytest.mark.parametrize("norm", ["sequence", "frame"])
def test_backward_hooks_on_a_normaliser_see_its_gradients(norm: Any) -> None:
    layer: Any = normrnn.LSTM(3, 2, norm=norm)
    seen: dict[str, torch.Tensor] = {}
    x = torch.randn(5, 4, 3)
    layer(x)[0].square().sum().backward()
    expected = layer.norm_l0.bias.grad.clone()
    layer.zero_grad()

    def keep(name: str, grad: Any) -> None:
        seen[name] = grad[0].clone()

    layer.norm_l0.register_full_backward_hook(lambda _, __, out: keep("hook", out))
    layer.norm_l0.register_full_backward_pre_hook(lambda _, out: keep("pre-hook", out))
    layer(x)[0].square().sum().backward()
    assert sorted(seen) == ["hook", "pre-hook"]
    for grad in seen.values():  # of the gate inputs, whose sum over rows is that of β
        torch.testing.assert_close(grad.sum(0), expected)


@pytest.mark.parametrize("norm", ["layer", "rms", "hidden", "recurrent", "whiten"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_hook_that_will_not_run_warns(norm: Any, kind: str) -> None:
    layer: Any = normrnn.LSTM(3, 2, norm=norm)
    with pytest.warns(UserWarning, match=type(layer.norm_l0).__name__) as caught:
        getattr(layer.norm_l0, f"register_{kind}_hook")(lambda *_: pytest.fail("it ran"))
    assert caught[0].filename == __file__
    layer(torch.randn(5, 4, 3))[0].sum().backward()
