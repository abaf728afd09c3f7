"""A space is data about config fields; what cannot be searched is named."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from normrnn.errors import UsageError
from normrnn.experiments.search.space import SPACES, check, draw, read_space, with_fields
from normrnn.recipes import RECIPES, recipe
from normrnn.text.config import LanguageConfig


@pytest.mark.parametrize("name", SPACES)
def test_own_spaces_fit_their_recipes(name: str) -> None:
    assert name in RECIPES
    assert read_space(None, recipe(name)) == SPACES[name]


def test_the_papers_space() -> None:
    assert SPACES["ptb-char"] == {
        "optimizer.lr": {"low": 1e-4, "high": 1.0, "log": True},
        "optimizer.momentum": [0.5, 0.8, 0.9, 0.95, 0.995],
        "train.batch": [32, 64, 128],
    }


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({}, "at least one config field"),
        ([1], "a space is a JSON object"),
        ({"optimizer.speed": [1]}, "optimizer.speed, which is no field of ptb-char"),
        ({"optimizer": [1]}, "optimizer, which is a group of fields"),
        ({"optimizer.lr.low": [1]}, "no field of ptb-char"),
        ({"norm": ["none"]}, "norm, which a search does not vary"),
        ({"text.level": ["word", "char"]}, "text.level: losses under different values of it"),
        ({"optimizer.lr": []}, "no values for optimizer.lr"),
        ({"optimizer.lr": {"low": 2, "high": 1}}, "empty: low 2 is above high 1"),
        ({"optimizer.lr": {"low": 1}}, "give a list of values, or low and high"),
        ({"optimizer.lr": 3}, "give a list of values, or low and high"),
        ({"optimizer.lr": {"low": 0, "high": 1, "log": True}}, "needs a low above 0"),
        ({"optimizer.lr": {"low": 0, "high": 1, "middle": 1}}, "'middle'"),
        ({"optimizer.lr": {"low": 0, "high": 1, "step": 0}}, "a step above 0"),
        ({"optimizer.lr": {"low": 0, "high": math.inf}}, "needs finite numbers"),
        ({"train.batch": [1, 8]}, "train.batch 1: norm hidden needs train.batch of at least 2"),
        (
            {"model.peephole": ["none", "all"], "model.cell": ["lstm", "gru"]},
            "model.peephole 'all' with model.cell 'gru': model.peephole is for cell lstm, not gru",
        ),
        (
            {"train.batch": [8, 16], "model.peephole": ["none", "all"]},
            "the space has model.peephole 'all': model.peephole is for cell lstm, not rnn",
        ),
        ({"optimizer.lr": {"low": None, "high": 1}}, "not one of numbers"),
        ({"optimizer.lr": {"low": 1, "high": 10**400}}, "needs finite numbers"),
        ({"optimizer.lr": {"low": math.nan, "high": 1}}, "needs finite numbers"),
        ({"optimizer.lr": {"low": "a", "high": "b"}}, "not one of numbers"),
        ({"train.batch": {"low": 1.5, "high": 3}}, "whole numbers"),
        ({"train.batch": [32, 0]}, "train.batch 0: train.batch must be at least 1"),
        ({"optimizer.name": ["sgd", "lbfgs"]}, "'lbfgs'"),
        ({"optimizer.name": {"low": 1, "high": 2}}, "not one of numbers"),
    ],
)
def test_what_cannot_be_searched(space: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        check(space, recipe("ptb-char"), ("none", "hidden"))
    assert "\n" not in str(raised.value)


def test_only_what_can_be_drawn_is_tried() -> None:
    """A value that the recipe alone refuses may be right with another; and a space may be large."""
    space: dict[str, Any] = {"model.cell": ["lstm"], "model.peephole": ["none", "all"]}
    check(space, recipe("ptb-char"), ("none", "hidden"))
    large = {f"optimizer.{name}": [0.1 * i for i in range(1, 10)] for name in ("lr", "decay")}
    large |= {"optimizer.clip_norm": list(range(1, 12)), "model.hidden": list(range(1, 12))}
    check(large, recipe("ptb-char"), ("none",))
    with pytest.raises(UsageError, match=r"the space has model\.hidden 0: model\.hidden must be"):
        check({**large, "model.hidden": [0, 1]}, recipe("ptb-char"), ("none",))


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "space.json"
    with pytest.raises(UsageError, match="cannot be read"):
        read_space(file, recipe("ptb-small"))
    file.write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        read_space(file, recipe("ptb-small"))
    file.write_text(json.dumps({"optimizer.lr": [1, 2, 4]}))
    assert read_space(file, recipe("ptb-small")) == {"optimizer.lr": [1, 2, 4]}
    with pytest.raises(UsageError, match="pass --space FILE"):
        read_space(None, recipe("ptb-small"))


class Fixed:
    """Notes what it is asked for, and takes the upper end."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def suggest_float(self, name: str, low: float, high: float, **more: Any) -> float:
        self.asked.append(("float", name, low, high, more))
        return high

    def suggest_int(self, name: str, low: int, high: int, **more: Any) -> int:
        self.asked.append(("int", name, low, high, more))
        return high

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        self.asked.append(("one of", name, choices))
        return choices[-1]


def test_a_setting_goes_into_the_config() -> None:
    config = recipe("ptb-char")
    space = {
        "optimizer.lr": {"low": 1e-4, "high": 1, "log": True},
        "model.hidden": {"low": 50, "high": 250, "step": 50, "log": None},
        "optimizer.name": ["sgd", "adam"],
    }
    trial = Fixed()
    drawn = draw(trial, space, config)
    assert trial.asked == [
        ("float", "optimizer.lr", 1e-4, 1, {"log": True}),
        ("int", "model.hidden", 50, 250, {"step": 50}),
        ("one of", "optimizer.name", ["sgd", "adam"]),
    ]
    changed = with_fields(config, {**drawn, "norm": "hidden"})
    assert isinstance(changed, LanguageConfig)
    assert (changed.optimizer.lr, changed.optimizer.name) == (1.0, "adam")
    assert (changed.model.hidden, changed.model.layers, changed.norm) == (250, 3, "hidden")
    assert recipe("ptb-char") == config
