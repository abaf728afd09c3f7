"""`normrnn report`, `compare` with its report, and both from Python."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import normrnn
from normrnn.errors import UsageError
from tests.commands.conftest import Cli
from tests.reporting.made_runs import make_run

TINY: dict[str, Any] = {"model": {"hidden": 12}, "train": {"batch": 8, "steps": 5, "log_every": 5}}


def test_wrong_calls(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", until=100)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    for arguments, expected, said in (
        ([], 2, "at least one run directory"),
        ([tmp_path / "nowhere"], 1, "nowhere does not exist"),
        ([tmp_path / "file"], 1, "is a file, not a run directory"),
        ([run, "-o", tmp_path / "file"], 1, "is not a report: not overwriting it"),
        ([tmp_path / "empty"], 1, "is not a run directory"),
        ([run, "--target", "nan"], 2, "nan"),
        ([run, "--target", "inf"], 2, "inf"),
        ([run, "-o", tmp_path], 1, "is a directory"),
        ([run, "-o", "/proc/nowhere/report.html"], 1, "cannot be written"),
    ):
        code, _, err = cli("report", *arguments)
        assert code == expected, arguments
        assert said in err
        assert len(err.strip().splitlines()) == 1
    assert (tmp_path / "file").read_text() == "mine"
    assert not list(tmp_path.glob("**/*.html"))
    assert cli("report", run, "--colour")[0] == 2


def test_the_answer_is_printed_and_the_report_is_in_the_directory(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run(tmp_path / "runs", norm=norm) for norm in ("none", "frame")]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, out, _ = cli("report", tmp_path / "runs")
    assert code == 0
    assert str(normrnn.verdict(list(runs))) in out
    assert (tmp_path / "runs" / "report.html").is_file()
    assert list(Path.cwd().iterdir()) == []
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=len))
    assert normrnn.reporting.load(runs[0]).frame() == 26
    assert cli("report", *runs)[0] == 0  # no directory of its own: the current one
    assert [path.name for path in Path.cwd().iterdir()] == ["report.html"]


def test_compare_from_python(
    text_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "both"
    result = normrnn.compare("ptb-small", out=out, data=text_dir, epochs=2, **TINY)
    runs = result.runs
    assert result.to_dict()["variants"]["frame"]["quality"]["answer"] == "one seed"
    assert [run.path.name for run in runs] == ["none-1", "frame-1"]
    assert all(run.finished for run in runs)
    assert runs[0].config["model"]["hidden"] == 12
    assert runs[1].rows == normrnn.reporting.load(out / "frame-1").rows
    report = (out / "report.html").read_text()
    assert "normrnn compare ptb-small" in report
    assert "threads" in report
    assert str(result) not in capsys.readouterr().out  # the caller prints it
    (place,) = runs[0].environments
    assert place.keys() == {
        *("normrnn", "torch", "numpy", "python", "cpu", "cores", "threads", "system"),
        "recurrence",
    }
    assert [axes.get_xlabel() for axes in result.plot().axes] == ["updates"]
    assert len(normrnn.reporting.figure(out / "none-1").axes) == 1


def test_wrong_comparisons_from_python(tmp_path: Path) -> None:
    for arguments, said in (
        ({"what": "ptb-smal"}, "did you mean ptb-small"),
        ({"norms": ("none", "batch")}, "'batch'"),
        ({"norms": "none,batch"}, "'batch'"),
        ({"seeds": 0}, "--seeds must be"),
        ({"model": {"hiden": 3}}, "'model.hiden'"),
        ({"hiden": 3}, "did you mean hidden"),
        ({"optimizer": "sgd"}, "optimizer.name, optimizer.lr"),
        ({"momentum": 0.5}, "model.momentum"),
        ({"jobs": 2}, "'jobs'"),
        ({"x": [1], "y": [1]}, "not both"),
        ({"epochs": "two"}, "epochs is 'two'"),
        ({"out": __file__}, "a file is in the way"),
        ({"what": len, "out": f"{__file__}/out"}, "a file is in the way"),
    ):
        with pytest.raises(UsageError, match=said):
            normrnn.compare(**{"what": "ptb-small", "out": tmp_path / "out", **arguments})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "line"),
    [({"batch_ppl": [1]}, 2), ({"seconds": 0}, 0), ({"updates": -1}, 1), ({"lr": "x"}, 2)],
)
def test_a_row_that_is_none_leaves_the_report(
    cli: Cli, tmp_path: Path, change: dict[str, Any], line: int, caplog: pytest.LogCaptureFixture
) -> None:
    runs = [make_run(tmp_path, norm=norm, epochs=2) for norm in ("none", "frame")]
    file = runs[1] / "metrics.jsonl"
    lines = file.read_text().splitlines()
    rows = [json.loads(text) for text in lines]
    for row in rows[:2] if line else [r for r in rows if r["split"] == "train"]:
        row |= change
    file.write_text("\n".join([*map(json.dumps, rows), ""]))
    code, _, _ = cli("report", tmp_path, "-o", tmp_path / "r.html")
    assert code == 0
    assert ("frame-1 is damaged: line" in caplog.text) == bool(line)


def test_runs_beside_comparisons_and_studies_are_all_found(cli: Cli, tmp_path: Path) -> None:
    """All in the places that the commands have for them."""
    runs = tmp_path / "runs"
    for norm in ("none", "frame"):
        make_run(runs / "ptb-small", norm=norm, name=f"{norm}-1")
    make_run(runs, norm="none", seed=2)
    search = runs / "ptb-small-search"
    make_run(search / "trials" / "0000", norm="none", seed=7, name="none")
    arm = {"diverged": False, "loss": 4.0, "train": 3.9}
    settings = {"settings": {"optimizer.lr": 1.0}, "state": "complete", "value": 4.0}
    trial = {"trial": 0, "arms": {"none": arm}, **settings}
    (search / "trials.jsonl").write_text(json.dumps(trial) + "\n")
    code, out, err = cli("report", runs, "-o", tmp_path / "r.html")
    assert code == 0, err
    assert "perplexity" in out
    for words in ("none, seed 1", "frame, seed 1", "none, seed 2", "ptb-small-search"):
        assert words in (tmp_path / "r.html").read_text()
