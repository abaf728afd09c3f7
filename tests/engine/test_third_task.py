"""A task is one module and a config class: nothing else has to know of it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import normrnn
from normrnn.cli import main
from normrnn.config import registry
from normrnn.reporting.groups import measure
from tests.tiny_runs import rows_of
from tests.toy_task import Coin, coin


@pytest.fixture
def recipe() -> Iterator[str]:
    registry.register(coin)
    yield "coin"
    registry.unregister("coin")


def command(*arguments: str | Path) -> None:
    with pytest.raises(SystemExit) as exited:
        main([str(argument) for argument in arguments])
    assert exited.value.code == 0


def test_it_is_trained_resumed_loaded_evaluated_and_reported(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command("train", recipe, "--weight", "2.5", "--out", run)
    command("train", recipe, "--weight", "2.5", "--epochs", "30", "--out", run)
    assert "a pocket" in capsys.readouterr().out
    rows = rows_of(run)
    assert {"surprise"} <= rows[0].keys()
    model = normrnn.load(run)
    assert isinstance(model, Coin)
    assert model.logit.item() == pytest.approx(1.0986, abs=0.05)  # log 3
    command("evaluate", run)
    assert "surprise 0.81 bits" in capsys.readouterr().out  # the entropy of 1/4
    assert json.loads((run / "evaluation.json").read_text())["recipe"] == recipe
    loaded = normrnn.reporting.load(run)
    assert measure([loaded]).long == "surprise, weight 2.5"
    command("report", run, "--out", tmp_path / "report.html")
    assert "surprise" in (tmp_path / "report.html").read_text()


def test_it_is_listed(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    command("recipes")
    assert "A coin, to show what a task is" in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"a recipe '{recipe}' already"):
        registry.register(coin)
