"""Spaces of settings: what is refused, and what is drawn."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from normrnn.errors import UsageError, UserError
from normrnn.experiments.search import SPACES, check_space, draw, grid, plan_trials, read_space
from normrnn.recipes import recipe

PTB_CHAR = recipe("ptb-char")


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({}, "at least one config field"),
        ({"optimizer.speed": [1]}, "optimizer.speed, which is not a field of ptb-char"),
        ({"optimizer": [1]}, "optimizer, which is not a field"),
        ({"norm": ["none"]}, "norm"),
        ({"seed": [1, 2]}, "seed"),
        ({"text.level": ["word", "char"]}, "text.level"),
        ({"optimizer.lr": []}, "optimizer.lr"),
        ({"optimizer.lr": {"low": 1}}, "optimizer.lr"),
        ({"optimizer.lr": 3}, "optimizer.lr"),
        ({"optimizer.lr": {"low": 2, "high": 1}}, "optimizer.lr"),
        ({"optimizer.lr": {"low": 0, "high": 1, "log": True}}, "optimizer.lr"),
        ({"optimizer.lr": {"low": 0, "high": 1, "middle": 1}}, "middle"),
        ({"optimizer.lr": {"low": 0, "high": math.inf}}, "finite"),
        ({"optimizer.lr": {"low": None, "high": 1}}, "optimizer.lr"),
        ({"optimizer.lr": {"low": 1, "high": 10**400}}, "optimizer.lr"),
        ({"optimizer.lr": {"low": "a", "high": "b"}}, "optimizer.lr"),
        ({"train.batch": {"low": 1.5, "high": 3}}, "whole"),
        ({"optimizer.name": {"low": 1, "high": 2}}, "optimizer.name"),
        ({"train.batch": [32, 0]}, "train.batch must be at least 1"),
        ({"optimizer.name": ["sgd", "lbfgs"]}, "lbfgs"),
        ({"train.batch": [1, 8]}, "norm hidden"),
        ({"model.peephole": ["none", "all"], "model.cell": ["lstm", "gru"]}, "not gru"),
    ],
)
def test_spaces_that_are_refused(space: Any, said: str) -> None:
    """By themselves, or for a setting that the config does not take with a norm."""

    def check() -> None:
        check_space(space, PTB_CHAR)
        plan_trials(grid(space), PTB_CHAR, ("none", "hidden"), Path())

    with pytest.raises(UsageError) as raised:
        check()
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_spaces_of_recipes_and_of_files(tmp_path: Path) -> None:
    for name, space in SPACES.items():
        assert read_space(None, recipe(name)) == space
    file, config = tmp_path / "space.json", recipe("ptb-small")
    file.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        read_space(file, config)
    file.write_text(json.dumps({"optimizer.lr": [1, 2, 4]}))
    assert read_space(file, config) == {"optimizer.lr": [1, 2, 4]}
    with pytest.raises(UsageError, match="pass --space FILE"):
        read_space(None, config)


def test_settings_follow_from_the_number_of_the_trial() -> None:
    space = {
        "optimizer.lr": {"low": 1e-4, "high": 1, "log": True},
        "model.hidden": {"low": 1, "high": 4, "log": True},
        "optimizer.name": ["sgd", "adam"],
    }
    drawn = [draw(space, PTB_CHAR, number) for number in range(40)]
    assert drawn[3] == draw(space, PTB_CHAR, 3)
    assert len({setting["optimizer.lr"] for setting in drawn}) == 40
    assert all(1e-4 <= setting["optimizer.lr"] <= 1 for setting in drawn)
    assert {setting["model.hidden"] for setting in drawn} == {1, 2, 3, 4}
    assert {setting["optimizer.name"] for setting in drawn} == {"sgd", "adam"}


def test_the_recorded_settings_are_drawn_again() -> None:
    """Those of results/studies/ptb-char-search."""
    file = Path(__file__).parents[2] / "results/studies/ptb-char-search/trials.jsonl"
    recorded = [json.loads(line)["settings"] for line in file.read_text().splitlines()[:5]]
    drawn = [draw(SPACES["ptb-char"], PTB_CHAR, number) for number in range(5)]
    assert drawn == recorded


def test_a_grid_has_every_setting() -> None:
    every = grid({"optimizer.lr": [0.1, 0.2, 0.3], "train.batch": [32, 64]})
    assert [setting["train.batch"] for setting in every] == [32, 64] * 3
    assert [setting["optimizer.lr"] for setting in every[::2]] == [0.1, 0.2, 0.3]
    with pytest.raises(UsageError, match=r"optimizer\.lr"):
        grid({"optimizer.lr": {"low": 0.1, "high": 1}})
