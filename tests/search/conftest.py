"""A search that takes seconds."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from normrnn.engine.start import open_experiment
from normrnn.experiments.search.plan import Plan
from normrnn.recipes.text import ptb_char
from normrnn.text.config import EvaluationConfig, LanguageConfig

SPACE = {
    "optimizer.lr": {"low": 1e-3, "high": 0.1, "log": True},
    "optimizer.momentum": [0.5, 0.9],
    "train.batch": [8, 16],
}


@pytest.fixture
def tiny_plan(text_dir: Path) -> Plan:
    """Two arms of 31 or 62 updates each."""
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
    config = tiny_plan.config
    assert isinstance(config, LanguageConfig)
    space = tmp_path / "space.json"
    space.write_text(json.dumps(SPACE))
    fixed = {
        "--data": config.data,
        "--epochs": 1,
        "--threads": 1,
        "--model.hidden": 8,
        "--model.embedding": 6,
        "--model.layers": 1,
        "--model.time-steps": 12,
        "--train.steps": 12,
        "--train.epoch-tokens": 6000,
        "--train.log-every": 2,
        "--train.checkpoint-every": 5,
        "--evaluation.train-tokens": 0,
        "--evaluation.recalibrate-windows": 2,
        "--evaluation.tokens": 200,
        "--space": space,
        "--heartbeat": 1,
    }

    def build(**more: object) -> list[str]:
        every = fixed | {f"--{k}": v for k, v in more.items()}
        return ["search", "ptb-char", *(str(part) for pair in every.items() for part in pair)]

    return build
