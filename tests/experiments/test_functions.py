"""A training function of a user's own, in this process and in others."""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

import normrnn
from normrnn.errors import UsageError, UserError
from normrnn.experiments.functions import RunLog
from tests.experiments.conftest import Cli

CALLS: list[tuple[str | None, int]] = []


def falling(norm: str | None, seed: int, log: RunLog) -> None:
    CALLS.append((norm, seed))
    for step in (0, 10, 20):
        value = torch.tensor(5.0 + seed / 100 - step / 10 - (norm == "layer"), requires_grad=True)
        log(step=step, train=value, valid=value, test=value + 1)


def accuracy(norm: str | None, seed: int, log: RunLog, gain: float) -> None:
    for step in (1, 2, 3):
        log(step, valid=0.5 + 0.01 * seed + 0.1 * step + gain * (norm is not None))


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


def test_every_norm_and_seed_is_called_once_and_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    out = tmp_path / "out"
    result = normrnn.compare(falling, norms=(None, "layer"), seeds=3, out="~/out", target=3.5)
    assert CALLS[:2] == [(None, 1), ("layer", 1)]
    assert len(CALLS) == 6
    quality = result.to_dict()["variants"]["layer"]["quality"]
    assert quality["answer"] == "better"
    assert quality["estimate"] == pytest.approx(-1)
    assert quality["seeds"] == 3
    assert [run.path.name for run in result.runs[:2]] == ["none-1", "layer-1"]
    assert [row["value"] for row in result.runs[0].split("valid")] == pytest.approx(
        [5.01, 4.01, 3.01]
    )
    assert "better" in str(result)
    assert len(repr(result)) < 200
    assert "<pre>" in result._repr_html_()
    assert result.plot().axes[0].lines
    result.save("~/report.html")
    for file in (out / "report.html", tmp_path / "report.html"):
        assert "to validation 3.5" in file.read_text()

    # Ended calls are skipped; new seeds are added. A change of the code is reported.
    monkeypatch.setattr("inspect.getsource", lambda _: "other code")
    again = normrnn.compare(falling, norms=(None, "layer"), seeds=4, out=out)
    assert CALLS[6:] == [(None, 4), ("layer", 4)]
    assert f"has changed since runs in {out} ended" in caplog.text
    assert len(again.runs) == 8
    assert normrnn.verdict(out).variants["layer"].quality.seeds == 4  # type: ignore[union-attr]


def test_a_call_that_was_stopped_is_not_finished_and_is_repeated(tmp_path: Path) -> None:
    def stops(norm: str | None, seed: int, log: RunLog) -> None:
        log(step=7, valid=1.0, test=1.0)
        if norm is not None and not CALLS:
            CALLS.append((norm, seed))
            raise KeyboardInterrupt
        log(step=8, train=0.5)

    with pytest.raises(KeyboardInterrupt):
        normrnn.compare(stops, out=tmp_path)
    ended, stopped = (normrnn.reporting.load(tmp_path / f"{n}-1") for n in ("none", "sequence"))
    assert (ended.finished, ended.progress, stopped.finished) == (True, "2 log calls", False)
    assert (stopped.verified, "sequence, seed 1" in str(normrnn.verdict(tmp_path))) == (True, True)
    result = normrnn.compare(stops, out=tmp_path)
    assert [len(run.split("valid")) for run in result.runs] == [1, 1]


def test_higher_is_better_and_further_arguments(tmp_path: Path) -> None:
    result = normrnn.compare(accuracy, seeds=3, higher_is_better=True, gain=0.05, out=tmp_path)
    values = result.to_dict()
    assert values["higher_is_better"] is True
    assert values["variants"]["sequence"]["quality"]["answer"] == "better"
    assert values["variants"]["sequence"]["quality"]["estimate"] == pytest.approx(0.05)
    assert values["ranking"][0][0] == "sequence"
    with pytest.raises(UsageError, match=r"gain was 0\.05, is now 0\.1"):
        normrnn.compare(accuracy, seeds=3, higher_is_better=True, gain=0.1, out=tmp_path)


def test_a_value_that_is_not_finite_is_a_divergence() -> None:
    def wild(norm: str | None, seed: int, log: RunLog) -> None:
        log(step=1, train=math.nan, valid=math.inf)  # a step that a scaler skips
        log(step=2, valid=1.0)
        log(step=3, valid=math.nan if norm else 1e301 if seed == 2 else 0.5)

    result = normrnn.compare(wild, seeds=2)
    assert result.to_dict()["diverged"] == {"none": [1, 2], "sequence": [2, 2]}


def frame(value: str) -> MagicMock:
    """What is used of a DataFrame, here of one column: no pandas is installed."""
    made = MagicMock(columns=["a"], index=None)
    made["a"].to_numpy.return_value = np.array([value], object)
    return made


@pytest.mark.parametrize(
    "table",
    [
        lambda last: torch.tensor([0.0] * 5000 + [last]),
        lambda last: [*range(30_000), last],
        lambda last: np.array([f"a{last}", None, np.array([last])], object),
        lambda last: frame(f"b{last}"),
    ],
)
def test_settings_are_recorded_by_their_content(
    table: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def reads(norm: Any, seed: int, log: RunLog, table: Any, other: Any) -> None:  # noqa: ARG001
        CALLS.append((norm, seed))
        log(step=1, valid=1.0)

    given: Any = {"norms": "none", "out": tmp_path, "other": np.array([object()])}
    for _ in range(2):
        normrnn.compare(reads, table=table(1), **given)
    assert len(CALLS) == 1
    assert (tmp_path / "none-1/config.json").stat().st_size < 1000
    assert "other is recorded as builtins.object only" in caplog.text
    assert "table" not in caplog.text
    with pytest.raises(UsageError, match="table was"):
        normrnn.compare(reads, table=table(2), **given)


def test_what_a_function_may_not_do(tmp_path: Path) -> None:
    def backwards(norm: Any, seed: int, log: RunLog) -> None:  # noqa: ARG001
        log(step=2, valid=1.0)
        log(step=1, valid=1.0)

    with pytest.raises(ValueError, match="1 after 2"):
        normrnn.compare(backwards)
    with pytest.raises(ValueError, match=r"0\.1 after 0"):
        normrnn.compare(lambda norm, seed, log: log(step=0.1, valid=1.0))  # noqa: ARG005
    with pytest.raises(UsageError, match="seed"):
        normrnn.compare(falling, seed="1")
    with pytest.raises(UserError, match="log"):
        normrnn.compare(lambda norm, seed, log: None, out=tmp_path / "a")  # noqa: ARG005
    with pytest.raises(UsageError, match="arguments"):
        normrnn.compare(lambda train: None)  # noqa: ARG005
    wrong = ({"tune": "optimizer.lr"}, {"processes": 2}, {"csv": True}, {"norms": ()})
    for option in (*wrong, {"norms": None}):
        with pytest.raises(UsageError, match=next(iter(option))):
            normrnn.compare(falling, **option)  # type: ignore[arg-type]
    for wrong in ({"target": math.nan}, {"seeds": "three"}):
        with pytest.raises(UsageError, match=str(*wrong.values())):
            normrnn.compare(falling, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"'val'.* valid"):
        normrnn.compare(lambda norm, seed, log: log(step=1, val=1.0))  # noqa: ARG005
    with pytest.raises(UsageError, match=r"lr .* nan"):
        normrnn.compare(lambda norm, seed, log: log(step=1, lr=math.nan))  # noqa: ARG005
    assert not CALLS
    with pytest.raises(UsageError, match=r"gain is \(1, 2\)"):
        normrnn.compare(accuracy, workers=2, out=tmp_path / "c", gain=(1, 2))
    with pytest.raises(UsageError, match="local"):
        normrnn.compare(backwards, workers=2, out=tmp_path / "b")
    backwards.__module__ = "__main__"
    with pytest.raises(UsageError, match="__main__"):
        normrnn.compare(backwards, workers=1, out=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_changed_rows_are_recognised(tmp_path: Path) -> None:
    normrnn.compare(falling, out=tmp_path)
    file = tmp_path / "none-1" / "metrics.jsonl"
    file.write_text(file.read_text().replace("4.01", "3.01"))
    with pytest.raises(UserError, match="damaged"):
        normrnn.reporting.load(tmp_path / "none-1")


def test_data_is_an_argument_of_the_function(tmp_path: Path) -> None:
    def reads(norm: str | None, seed: int, log: RunLog, data: str) -> None:  # noqa: ARG001
        log(step=1, valid=float(data))

    result = normrnn.compare(reads, data="2.5", out=tmp_path)
    assert [run.rows[0]["value"] for run in result.runs] == [2.5, 2.5]
    with pytest.raises(UsageError, match="data"):
        normrnn.compare(falling, data="2.5", out=tmp_path / "other")


def test_a_foreign_config_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "none-1").mkdir()
    for content in ("[]", "{}", "3", "{"):
        (tmp_path / "none-1" / "config.json").write_text(content)
        with pytest.raises(UserError, match="config"):
            normrnn.compare(falling, out=tmp_path)


def test_in_processes_of_their_own(cli: Cli, own_directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    call = ["compare", "own_module:train", "--path", own_directory, "--out", out]
    call += ["--norms", "none,sequence", "--seeds", "3", "--workers", "2"]
    code, said, error = cli(*call)
    assert code == 0, error
    assert "better" in said
    assert {path.name for path in out.iterdir()} == {
        *(f"{norm}-{seed}" for norm in ("none", "sequence") for seed in (1, 2, 3)),
        "report.html",
    }
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")}
    assert cli(*call)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    code, said, _ = cli("info", out / "none-1")
    assert (code, "| valid | – | 6.1000 |" in said) == (0, True)
    for command in (("evaluate",), ("export", "-o", tmp_path / "model")):
        code, _, error = cli(*command, out / "none-1")
        assert (code, "--use" in error, "own_module:train" in error) == (1, False, True)
    code, said, _ = cli("verdict", out, "--json")
    quality = json.loads(said)["variants"]["sequence"]["quality"]
    assert (code, quality["answer"], quality["seeds"]) == (0, "better", 3)
    assert quality["estimate"] == pytest.approx(-1)


def test_an_error_in_another_process_is_named(
    cli: Cli, own_directory: Path, tmp_path: Path
) -> None:
    call = ["compare", "own_module:broken", "--path", own_directory, "--out", tmp_path / "out"]
    code, _, error = cli(*call, "--workers", "2")
    assert (code, "sequence-1" in error, "no more data" in error) == (1, True, True)
    code, _, error = cli(*call, "--norms", "layer")
    assert (code, "sys.exit(3)" in error) == (1, True)
    code, _, error = cli(*call, "--steps", "30")
    assert (code, "--steps" in error, "normrnn.compare(" in error) == (2, True, True)
