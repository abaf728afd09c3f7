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
        ({"optimizer.speed": [1]}, "optimizer.speed, which is not a field of ptb-char"),
        ({"optimizer": [1]}, "optimizer, which is not a field"),
        ({"norm": ["none"]}, "norm, which a search does not vary"),
        ({"text.level": ["word", "char"]}, "text.level"),
        ({"optimizer.lr": []}, "optimizer.lr"),
        ({"optimizer.lr": {"low": 1}}, "optimizer.lr"),
        ({"optimizer.lr": 3}, "optimizer.lr"),
        ({"optimizer.lr": {"low": 2, "high": 1}}, "optimizer.lr"),
        ({"optimizer.lr": {"low": 0, "high": 1, "log": True}}, "optimizer.lr"),
        ({"optimizer.lr": {"low": 0, "high": 1, "middle": 1}}, "middle"),
        ({"optimizer.lr": {"low": 0, "high": 1, "step": 0}}, "step"),
        ({"optimizer.lr": {"low": 0, "high": math.inf}}, "not finite"),
        ({"optimizer.lr": {"low": None, "high": 1}}, "optimizer.lr"),
        ({"optimizer.lr": {"low": 1, "high": 10**400}}, "optimizer.lr"),
        ({"optimizer.lr": {"low": "a", "high": "b"}}, "optimizer.lr"),
        ({"train.batch": {"low": 1.5, "high": 3}}, "int values"),
        ({"optimizer.name": {"low": 1, "high": 2}}, "optimizer.name"),
        ({"train.batch": [32, 0]}, "train.batch must be at least 1"),
        ({"optimizer.name": ["sgd", "lbfgs"]}, "lbfgs"),
        ({"train.batch": [1, 8]}, "norm hidden"),
        ({"model.peephole": ["none", "all"], "model.cell": ["lstm", "gru"]}, "not gru"),
    ],
)
def test_spaces_that_are_refused(space: Any, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        check(space, recipe("ptb-char"), ("none", "hidden"))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_only_what_can_be_drawn_is_tried() -> None:
    """A value that the recipe alone refuses may be right with another; and a space may be large."""
    space: dict[str, Any] = {"model.cell": ["lstm"], "model.peephole": ["none", "all"]}
    check(space, recipe("ptb-char"), ("none", "hidden"))
    large = {f"optimizer.{name}": [0.1 * i for i in range(1, 10)] for name in ("lr", "decay")}
    large |= {"optimizer.clip_norm": list(range(1, 12)), "model.hidden": list(range(1, 12))}
    check(large, recipe("ptb-char"), ("none",))
    with pytest.raises(UsageError, match=r"model\.hidden must be"):
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
    drawn = draw(trial, space, config)  # type: ignore[arg-type]
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
