"""What the usual helpers do to our layers: the table of docs/guides/frameworks.md, row by row.

Its row on ``Join`` is tested in test_other_peoples_ranks.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import dynamic
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

import normrnn
from tests.helpers import gradients, unchanged


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm: Any = normrnn.LSTM(3, 4, **{"norm": "sequence", **options})
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def trained() -> tuple[Model, Tensor]:
    model, x = Model(), torch.randn(6, 5, 3) * 2 + 1
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
    update_bn([x], nn.Sequential(model, nn.Flatten(0, 1), nn.BatchNorm1d(2)))
    assert model.lstm.norm_l0.num_batches_tracked.item() == 4
    normrnn.recalibrate(model, [x])
    check_recalibrated(model.lstm, x)


def test_convert_sync_batchnorm() -> None:
    model, _ = trained()
    converted: Any = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(converted.lstm.norm_l0) is normrnn.nn.Normaliser
    assert not converted.lstm.norm_l0.sync
    assert Model(sync=True).lstm.norm_l0.sync


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
