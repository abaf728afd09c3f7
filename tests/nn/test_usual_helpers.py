"""What the usual helpers do to our layers: the table of docs/guides/frameworks.md, row by row; and
hooks on normalisers.

The row on ``Join`` is tested in test_other_peoples_ranks.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import dynamic
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

import normrnn
from tests.helpers import Tagger, gradients, unchanged


def trained() -> tuple[Any, Tensor]:
    model, x = Tagger(normrnn.LSTM(3, 4, norm="sequence")), torch.randn(6, 5, 3) * 2 + 1
    for _ in range(3):
        model(x).sum().backward()
    return model, x


def check_recalibrated(layer: Any, x: Tensor) -> None:
    pre = x.flatten(0, 1) @ layer.weight_ih_l0.detach().t()
    torch.testing.assert_close(layer.norm_l0.running_mean, pre.mean(0))


def test_update_bn() -> None:
    """Finds nothing to update, and does not even run the model; but with a BatchNorm in the model
    it trains ours on: one update per batch, by momentum."""
    model, x = trained()
    with unchanged(model):
        update_bn([x], model)
    update_bn([x], nn.Sequential(model, nn.Flatten(0, 1), nn.BatchNorm1d(3)))
    assert model.lstm.norm_l0.num_batches_tracked.item() == 4
    normrnn.recalibrate(model, [x])
    check_recalibrated(model.lstm, x)


def test_convert_sync_batchnorm() -> None:
    model, _ = trained()
    converted: Any = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(converted.lstm.norm_l0) is normrnn.nn.Normaliser
    assert not converted.lstm.norm_l0.sync
    synced: Any = normrnn.LSTM(3, 4, norm="sequence", sync=True)
    assert synced.norm_l0.sync


def test_freezing() -> None:
    model, x = trained()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    with pytest.raises(AssertionError), unchanged(model):  # the usual loop has found nothing
        model(x)
    for normaliser in model.lstm.normalisers():
        normaliser.eval()
        normaliser.requires_grad_(False)
    with unchanged(model):
        model(x).sum().backward()
    assert model.lstm.training


@pytest.mark.filterwarnings("ignore")
def test_quantize_dynamic() -> None:
    model, x = trained()
    model.eval()
    kinds = {nn.LSTM, nn.Linear}
    ours: Any = torch.ao.quantization.quantize_dynamic(model, kinds)
    assert type(ours.lstm) is normrnn.LSTM  # left alone
    assert type(ours.head) is dynamic.Linear
    plain: Any = torch.ao.quantization.quantize_dynamic(normrnn.fold(model), kinds)
    assert type(plain.lstm) is dynamic.LSTM
    assert (plain(x) - model(x)).abs().max() < 0.1


def test_gradient_checkpointing() -> None:
    """The same gradients; the pass is made twice, and so are the updates, as with BatchNorm."""
    model, x = trained()
    found = []
    for again in (False, True):
        model.zero_grad()
        tracked = model.lstm.norm_l0.num_batches_tracked.item()
        output: Any = checkpoint(model, x, use_reentrant=False) if again else model(x)
        output.square().sum().backward()
        found.append(gradients(model))
        assert model.lstm.norm_l0.num_batches_tracked.item() == tracked + 1 + again
    torch.testing.assert_close(*found)


def test_averaged_weights() -> None:
    """Statistics come from the model averaged last, whose weights they belong to."""
    model, x = trained()
    averaged = AveragedModel(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model(x)
    averaged.update_parameters(model)
    mine: Any = averaged.module
    assert torch.equal(mine.lstm.norm_l0.running_mean, model.lstm.norm_l0.running_mean)
    normrnn.recalibrate(averaged, [x])
    check_recalibrated(mine.lstm, x)
    plain = normrnn.fold(mine.eval())
    torch.testing.assert_close(plain(x), mine(x), rtol=1e-4, atol=1e-5)


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
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(module: nn.Module, _: object, out: Tensor) -> None:
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
    seen: dict[str, Tensor] = {}
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
