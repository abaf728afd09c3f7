"""A task of a user's own is one module; nothing else has to know of it."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import normrnn
from normrnn.cli import main
from normrnn.config import registry
from tests import toy_task
from tests.tiny_runs import rows_of
from tests.toy_task import MajorityNetwork, MajorityTask, majority


@pytest.fixture
def recipe() -> Iterator[str]:
    registry.register(majority)
    yield "majority"
    del registry.recipes()["majority"]


def command(*arguments: str | Path) -> None:
    with pytest.raises(SystemExit) as exited:
        main([str(argument) for argument in arguments])
    assert exited.value.code == 0


def test_it_is_short() -> None:
    assert len(Path(toy_task.__file__).read_text().splitlines()) <= 60


def test_it_is_trained_resumed_loaded_evaluated_and_reported(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    options = ("--norm", "sequence", "--optimizer.name", "adam", "--optimizer.lr", "0.05")
    command("train", recipe, *options, "--out", run)
    command("train", recipe, *options, "--epochs", "30", "--out", run)
    command("train", recipe, *options, "--epochs", "30", "--out", whole)
    assert "coin tosses" in capsys.readouterr().out
    rows = rows_of(run)
    assert rows == rows_of(whole)
    assert "surprise" in rows[0]
    splits = {row["split"] for row in rows}
    assert splits == {"train", "valid", "best_valid", "test"}
    assert min(row["loss"] for row in rows if row["split"] == "valid") < 0.3
    model = normrnn.load(run)
    assert isinstance(model, MajorityNetwork)
    command("evaluate", run)
    assert "surprise" in capsys.readouterr().out
    result = json.loads((run / "evaluation.json").read_text())
    assert result["recipe"] == recipe
    x, y = MajorityTask(majority()).data["test"]
    with torch.no_grad():
        nats = model.loss(x, y).total.item() / len(y)
    by_kind = {r["statistics"]: r for r in result["rows"] if r["split"] == "test"}
    kind = next(r["statistics"] for r in rows[-3:] if r.get("saved"))
    assert by_kind[kind]["loss"] == pytest.approx(nats, rel=1e-5)
    assert by_kind[kind]["surprise"] == pytest.approx(nats / math.log(2), rel=1e-5)
    loaded = normrnn.reporting.load(run)
    assert loaded.measure.long == "surprise in bits, 8 cells"
    command("report", run, "--out", tmp_path / "report.html")
    assert "surprise" in (tmp_path / "report.html").read_text()


def test_its_network_may_have_buffers_that_are_not_saved(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Network(MajorityNetwork):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("positions", torch.arange(9), persistent=False)

    monkeypatch.setattr(MajorityTask, "network", Network)
    for epochs in ("1", "2"):
        command("train", recipe, "--norm", "sequence", "--epochs", epochs, "--out", tmp_path)
    assert "positions" not in torch.load(tmp_path / "checkpoint.pt")["best_running"]
    command("evaluate", tmp_path)


def test_it_is_listed(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    command("recipes")
    assert "A majority vote" in capsys.readouterr().out
    with pytest.raises(ValueError, match=recipe):
        registry.register(majority)


def test_it_is_compared_by_its_import_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = Path(toy_task.__file__).parents[1], tmp_path / "out"
    where = ("tests.toy_task:majority", "--path", root, "--out", out)
    command("compare", *where, "--norms", "none,sequence", "--epochs", "1")
    runs = {path.parent.name for path in out.glob("*/metrics.jsonl")}
    assert runs == {"none-1", "sequence-1"}
    assert "surprise" in (out / "report.html").read_text()
    known = normrnn.verdict(out).to_dict()
    del registry.recipes()["tests.toy_task:majority"]  # as where it is not imported
    assert (normrnn.verdict(out).to_dict(), known["measure"]) == (known, "surprise")
    command("info", out / "none-1")
    assert "| surprise |" in capsys.readouterr().out
    row, shown = {"loss": 9.0, "value": 0.5}, {"name": "accuracy", "higher_is_better": True}
    assert registry.with_values({"shown": shown}, [row])[0]["loss"] == -0.5
