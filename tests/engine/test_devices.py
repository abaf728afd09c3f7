"""Devices and precision: what can be known without a GPU."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from normrnn import norms
from normrnn.config.base import Config
from normrnn.config.registry import task_of
from normrnn.engine.loop import Interrupt, Trainer
from normrnn.errors import UsageError
from normrnn.runs.environment import named_device
from normrnn.runs.store import RunDirectory
from normrnn.speech.config import SpeechConfig
from normrnn.text.config import LanguageConfig
from tests.tiny_runs import rows_of, run_tiny


def steps_on(device: str, config: Config, where: Path) -> Any:
    """Two updates; the figures of the second, still on the device."""
    task = task_of(config).open(config).build(torch.device(device))
    trainer = Trainer(config, task, RunDirectory(where), Interrupt())
    task.model.train()
    trainer.step(0, 0)
    return trainer.step(0, 1)


@pytest.mark.parametrize("norm", norms.names())
@pytest.mark.parametrize("task", ["text", "speech"])
def test_a_step_does_not_wait_for_the_device(
    norm: str, task: str, tiny: LanguageConfig, tiny_speech: SpeechConfig, tmp_path: Path
) -> None:
    """The meta device has no numbers: `.item()`, `.cpu()`, a branch on a value, or a tensor made
    on the CPU by mistake is an error there."""
    base = tiny if task == "text" else tiny_speech
    config = replace(base, norm=norm, model=replace(base.model, shrinkage=0.1))
    loss, grad_norm = steps_on("meta", config, tmp_path)
    assert loss.total.device.type == grad_norm.device.type == "meta"
    assert task == "text" or loss.errors.device.type == "meta"


def test_the_check_detects_an_item_call(tiny: LanguageConfig, tmp_path: Path) -> None:
    task = task_of(tiny).open(tiny).build(torch.device("meta"))
    trainer = Trainer(tiny, task, RunDirectory(tmp_path), Interrupt())
    with pytest.raises(RuntimeError, match="meta"):
        trainer.update()


def test_auto_is_a_device_that_is_there() -> None:
    assert named_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(UsageError, match="no device 'tpu'"):
        named_device("tpu")


@pytest.mark.parametrize("task", ["text", "speech"])
def test_training_in_bf16(
    task: str, tiny: LanguageConfig, tiny_speech: SpeechConfig, tmp_path: Path
) -> None:
    dropped = {"dropout_kind": "locked", "weight_drop": 0.3, "zoneout_h": 0.1, "zoneout_c": 0.2}
    base = replace(tiny, model=replace(tiny.model, **dropped)) if task == "text" else tiny_speech
    config: Any = replace(base, norm="frame", epochs=1, train=replace(base.train, log_every=1))
    for precision in ("fp32", "bf16"):
        run_tiny(replace(config, precision=precision), tmp_path / precision)
    full, half = rows_of(tmp_path / "fp32"), rows_of(tmp_path / "bf16")
    assert len(full) == len(half) > 1
    assert all(math.isfinite(row["loss"]) for row in half)
    assert half != full, "bf16 changed nothing"
    # Before the first step: after some, a network of a few cells is somewhere else.
    assert half[0]["loss"] == pytest.approx(full[0]["loss"], rel=0.01)
