"""A search that takes seconds."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from normrnn.config.jsonio import flat, to_dict
from normrnn.engine.start import open_experiment
from normrnn.experiments.search.study import Plan
from normrnn.recipes import recipe
from normrnn.recipes.text import ptb_char
from normrnn.text.config import EvaluationConfig

SPACE = {
    "optimizer.lr": {"low": 1e-3, "high": 0.1, "log": True},
    "optimizer.momentum": [0.5, 0.9],
    "train.batch": [8, 16],
}


@pytest.fixture
def tiny_plan(text_dir: Path) -> Plan:
    """Two variants of 31 or 62 updates each."""
    config = ptb_char()
    config = replace(
        config,
        data=str(text_dir),
        epochs=1,
        threads=1,
        model=replace(config.model, hidden=8, embedding=6, layers=1, time_steps=12),
        train=replace(config.train, steps=12, epoch_tokens=6000, log_every=2, checkpoint_every=5),
        evaluation=EvaluationConfig(train_tokens=0, recalibrate_windows=2, tokens=200),
    )
    found = open_experiment(config)
    return Plan(replace(config, data=found.where, data_sha256=found.sha256), SPACE)


@pytest.fixture
def flags(tiny_plan: Plan, tmp_path: Path) -> Callable[..., list[str]]:
    """The same on the command line."""
    space = tmp_path / "space.json"
    space.write_text(json.dumps(SPACE))
    usual, tiny = (flat(to_dict(config)) for config in (recipe("ptb-char"), tiny_plan.config))
    fixed = {name: tiny[name] for name in tiny if tiny[name] != usual[name]}
    del fixed["data_sha256"]
    fixed |= {"space": space, "heartbeat": 1}

    def build(**more: object) -> list[str]:
        pairs = (fixed | more).items()
        words = ((f"--{name.replace('_', '-')}", str(value)) for name, value in pairs)
        return ["search", "ptb-char", *(word for pair in words for word in pair)]

    return build
