"""Variants of one seed share initial values, data order and dropout masks, and record it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from normrnn.config.registry import task_of
from normrnn.engine.loop import Interrupt, Trainer
from normrnn.norms import names
from normrnn.runs.store import RunDirectory
from normrnn.speech.config import SpeechConfig
from normrnn.text.config import LanguageConfig


def _initial(config) -> dict[str, Tensor]:
    torch.manual_seed(config.seed)
    model = task_of(config).open(config).build(torch.device("cpu")).model
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _shares_all_drawn_values(variants: dict[str, dict[str, Tensor]]) -> None:
    baseline = variants["none"]
    for norm, values in variants.items():
        for name, value in values.items():
            if name in baseline and norm != "none":
                assert torch.equal(value, baseline[name]), (norm, name)
        weights = {n for n in baseline if "weight" in n}
        assert weights <= values.keys(), norm
    assert len({tuple(v.shape) for v in baseline.values()}) < len(baseline)


@pytest.mark.parametrize("initialiser", ["uniform", "glorot"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_text_variants_start_from_the_same_weights(tiny: LanguageConfig, cell, initialiser) -> None:
    model = replace(tiny.model, cell=cell, initialiser=initialiser, shrinkage=0.1)
    configs = {norm: replace(tiny, norm=norm, model=model) for norm in names()}
    variants = {norm: _initial(config) for norm, config in configs.items()}
    _shares_all_drawn_values(variants)
    weights = variants["none"]
    # Parameters of the same shape are drawn independently, and another seed draws others.
    assert not torch.equal(weights["rnn.weight_hh_l0"], weights["rnn.weight_hh_l1"])
    other = _initial(replace(configs["none"], seed=2))
    assert not torch.equal(weights["rnn.weight_hh_l0"], other["rnn.weight_hh_l0"])


def test_speech_variants_start_from_the_same_weights(tiny_speech: SpeechConfig) -> None:
    model = replace(tiny_speech.model, shrinkage=0.1)
    _shares_all_drawn_values(
        {norm: _initial(replace(tiny_speech, norm=norm, model=model)) for norm in names()}
    )


def _masks(config: LanguageConfig) -> list[Tensor]:
    """Where the inputs of the recurrent stack and of the softmax are dropped, update by update."""
    torch.manual_seed(config.seed)
    task = task_of(config).open(config).build(torch.device("cpu"))
    masks: list[Tensor] = []
    task.model.dropout.register_forward_hook(lambda _, __, output: masks.append(output == 0))
    trainer = Trainer(config, task, RunDirectory(Path(config.data)), Interrupt())
    task.model.train()
    for _ in range(2):
        trainer.update()
    return masks


def test_variants_draw_the_same_dropout_masks(tiny: LanguageConfig) -> None:
    expected = _masks(replace(tiny, norm="none"))
    assert len(expected) == 4
    assert not torch.equal(expected[0], expected[2])
    for norm in ("sequence", "frame", "layer", "recurrent"):
        for mask, same in zip(_masks(replace(tiny, norm=norm)), expected, strict=True):
            assert torch.equal(mask, same), norm
