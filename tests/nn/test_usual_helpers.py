"""What the usual helpers do to our layers: the table of docs/guides/frameworks.md, row by row."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import dynamic
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

import normrnn

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "frameworks.md"


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


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, b[name]) for name, value in a.items())


def test_update_bn() -> None:
    """Finds nothing to update, and does not even run the model."""
    model, x = trained()
    before = buffers(model)
    update_bn([x], model)
    assert same(before, buffers(model))
    normrnn.recalibrate(model, [x])
    pre = x.flatten(0, 1) @ model.lstm.weight_ih_l0.detach().t()
    torch.testing.assert_close(model.lstm.norm_l0.running_mean, pre.mean(0))


def test_update_bn_beside_torchs_own() -> None:
    """With a BatchNorm in the model it trains ours on: one update per batch, by momentum."""
    model, x = trained()
    both = nn.Sequential(model, nn.Flatten(0, 1), nn.BatchNorm1d(2))
    update_bn([x], both)
    assert model.lstm.norm_l0.num_batches_tracked.item() == 4


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
    before = buffers(model)
    model(x)
    assert not same(before, buffers(model))  # the usual loop has found nothing
    for normaliser in model.lstm.normalisers():
        normaliser.eval()
        normaliser.requires_grad_(False)
    before = buffers(model)
    model(x).sum().backward()
    assert same(before, buffers(model))
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
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert model.lstm.norm_l0.num_batches_tracked.item() == tracked + 1 + again
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


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
    pre = x.flatten(0, 1) @ mine.lstm.weight_ih_l0.detach().t()
    torch.testing.assert_close(mine.lstm.norm_l0.running_mean, pre.mean(0))
    plain = normrnn.fold(mine.eval())
    torch.testing.assert_close(plain(x), mine(x), rtol=1e-4, atol=1e-5)


JOINED = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
import normrnn
rank, store, sync = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "sync"
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
torch.manual_seed(0)
model = DistributedDataParallel(normrnn.LSTM(3, 4, sync=sync, norm="sequence"))
with Join([model]):
    for _ in range(2 + rank):
        model(torch.randn(5, 4, 3))[0].sum().backward()
print(int(model.module.norm_l0.num_batches_tracked))
dist.barrier()
dist.destroy_process_group()  # or its threads may outlive the interpreter, which ends in an abort
"""


@pytest.mark.slow
def test_join(tmp_path: Path) -> None:
    """Ranks with unequal numbers of batches: fine while each keeps statistics of its own."""
    command = [sys.executable, "-c", JOINED]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    how: Any = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), "local"], **how)
        for rank in (0, 1)
    ]
    try:
        done = [process.communicate(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (out, err) in zip(ranks, done, strict=True):
        assert process.returncode == 0, err
        assert int(out) == 3  # in the end all have the model of the rank that went on longest


ROWS = {
    "torch.optim.swa_utils.update_bn": test_update_bn,
    "nn.SyncBatchNorm.convert_sync_batchnorm": test_convert_sync_batchnorm,
    "_BatchNorm": test_freezing,
    "torch.ao.quantization.quantize_dynamic": test_quantize_dynamic,
    "torch.utils.checkpoint": test_gradient_checkpointing,
    "AveragedModel": test_averaged_weights,
    "Join": test_join,
}


def test_every_row_of_the_table_has_its_test() -> None:
    table = PAGE.read_text().split("## What the usual helpers do")[1].split("\n## ")[0]
    rows = re.findall(r"^\| .*?`([\w.]+)`", table, re.MULTILINE)
    assert sorted(rows) == sorted(ROWS)
