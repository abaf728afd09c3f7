"""Runs made before the package was regrouped: they load, evaluate, go on and are reported.

`tests/old_runs` holds, for text and for speech, a run that was stopped in the middle, what
`normrnn evaluate` said of it, and the rows of the same run when it was not stopped.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import normrnn
from normrnn.cli import main

OLD = Path(__file__).parents[1] / "old_runs"
UNTIMED = ("seconds",)


@pytest.fixture(params=["text", "speech"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run(kind: str, tmp_path: Path) -> Path:
    """A copy that may be written to."""
    return Path(shutil.copytree(OLD / kind, tmp_path / kind))


def data(kind: str) -> str:
    return str(OLD / f"{kind}-data")


def command(*arguments: str | Path) -> None:
    with pytest.raises(SystemExit) as exited:
        main([str(a) for a in arguments])
    assert exited.value.code == 0


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Same rows; numbers as near as float32 sums in another order."""
    assert len(found) == len(expected)
    for row, old in zip(found, expected, strict=True):
        assert row.keys() >= old.keys()
        for key in old.keys() - {*UNTIMED}:
            expected_value = old[key]
            if isinstance(expected_value, float):
                expected_value = pytest.approx(expected_value, rel=1e-4)
            assert row[key] == expected_value, (key, row, old)


def test_loads(run: Path, kind: str) -> None:
    model = normrnn.load(run)
    assert not model.training
    weights = torch.cat([p.flatten() for p in model.parameters()])
    assert weights.isfinite().all()
    assert kind == "speech" or len(getattr(model, "vocabulary")) == 26  # noqa: B009


def test_evaluates_to_the_same_figures(run: Path, kind: str) -> None:
    before = json.loads((run / "evaluation.json").read_text())
    (run / "evaluation.json").unlink()
    command("evaluate", run, "--data", data(kind))
    now = json.loads((run / "evaluation.json").read_text())
    assert now["same_data"]
    assert_close(now["rows"], before["rows"])


def test_goes_on_as_if_it_had_not_stopped(run: Path, kind: str) -> None:
    config = json.loads((run / "config.json").read_text())
    flags: list[str] = []

    def flag(values: dict[str, Any], prefix: str = "") -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                flag(value, f"{prefix}{name}.")
            elif name not in ("recipe", "data", "data_sha256"):
                no = "no-" if value is False else ""
                spelt = f"--{prefix}{no}{name}".replace("_", "-")
                flags.extend([spelt] if isinstance(value, bool) else [spelt, str(value)])

    flag(config)
    command("train", config["recipe"], *flags, "--data", data(kind), "--out", run)
    assert_close(rows(run / "metrics.jsonl"), rows(run / "finished-metrics.jsonl"))


def test_is_reported(run: Path, tmp_path: Path) -> None:
    loaded = normrnn.report.load(run)
    assert len(loaded.rows) == len((run / "metrics.jsonl").read_text().splitlines())
    page = tmp_path / "report.html"
    command("report", run, "--out", page)
    assert loaded.recipe in page.read_text()
