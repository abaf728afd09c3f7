"""Configs as JSON: complete, typed, and named when they differ."""

import json
import math
from dataclasses import replace

import pytest

from normrnn.config.base import OptimizerConfig
from normrnn.config.jsonio import from_dict, to_dict
from normrnn.errors import UserError
from normrnn.recipes import RECIPES, read_config, recipe
from normrnn.text.config import LanguageConfig, ModelConfig, TrainConfig


@pytest.mark.parametrize("name", RECIPES)
def test_round_trip(name: str) -> None:
    config = recipe(name)
    values = json.loads(json.dumps(to_dict(config)))
    assert values["recipe"] == name
    assert values["norm"] == "none"
    assert read_config(values) == config


def test_missing_field_takes_its_default_unless_it_has_none() -> None:
    values = to_dict(recipe("ptb-small"))
    del values["train"]["segments"]
    assert from_dict(LanguageConfig, values).train.segments == 1
    del values["recipe"]
    with pytest.raises(UserError, match="lacks the field recipe"):
        from_dict(LanguageConfig, values)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("hidden", "many", r"model\.hidden is 'many', not int"),
        ("hidden", 1.5, r"model\.hidden is 1.5, not int"),
        ("peephole", "some", r"model\.peephole is 'some', not one of none, output, all"),
        ("colour", 1, r"unknown field model\.colour"),
    ],
)
def test_wrong_values_are_named(field: str, value: object, said: str) -> None:
    values = to_dict(recipe("ptb-small"))
    values["model"][field] = value
    with pytest.raises(UserError, match=said):
        from_dict(LanguageConfig, values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"model": ModelConfig(dropout=1.0)}, "model.dropout"),
        ({"model": ModelConfig(hidden=0)}, "model.hidden"),
        ({"model": ModelConfig(momentum=7.0)}, r"model.momentum must lie in \[0, 1\], not 7.0"),
        ({"model": ModelConfig(gamma=math.nan)}, "model.gamma must be a finite number"),
        ({"optimizer": OptimizerConfig(lr=math.inf)}, "optimizer.lr must be a finite number"),
        ({"optimizer": OptimizerConfig(momentum=-1.0)}, "optimizer.momentum must be"),
        ({"optimizer": OptimizerConfig(weight_decay=-1.0)}, "optimizer.weight_decay must be"),
        ({"seed": 2**32}, "seed must lie in"),
        ({"norm": "batch"}, "norm has 'batch', not one of none, sequence, frame, hidden, layer"),
        ({"model": ModelConfig(cell="rnn", peephole="all")}, "model.peephole is for cell lstm"),
        ({"norm": "frame", "train": TrainConfig(batch=1)}, "train.batch of at least 2"),
    ],
)
def test_impossible_settings_are_refused_by_name(change: dict, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        replace(recipe("ptb-small"), **change)
    assert raised.value.code == 2
