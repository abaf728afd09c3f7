"""A study in the report: its words, tables and picture; whatever its files look like."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from normrnn.cli import main
from normrnn.report.page import THEMES, markdown, page
from normrnn.report.runs import find
from normrnn.report.study import RecordedStudy, find_studies, read_study, write
from normrnn.report.trials import trials_table
from tests.report.made_runs import make_run
from tests.report.test_page import HTML, SVG, Reader
from tests.report.test_study import TRIALS

BAD = "<script>alert(1)</script>"
SPACE = {"optimizer.lr": {"low": 1e-4, "high": 1, "log": True}, "train.batch": [32, 64]}
ABOUT: dict[str, Any] = {"study": "mine", "trials": 6, "space": SPACE, "norms": ["none", "hidden"]}
ABOUT |= {"sampler": "random", "pruner": "none"}
ABOUT |= {"config": {"recipe": "ptb-char", "epochs": 3, "train": {"epoch_tokens": 5000}}}


def shown(*paths: Path) -> str:
    studies, places = find_studies(paths)
    return page(find(places), studies=studies)


def kept(parent: Path, *lines: str) -> Path:
    parent.mkdir(parents=True)
    (parent / "trials.jsonl").write_text("".join(lines))
    return parent


LINES = [json.dumps(trial) + "\n" for trial in TRIALS]


def test_a_study_with_its_best_runs(tmp_path: Path) -> None:
    study = RecordedStudy(tmp_path / "char", TRIALS, ABOUT)
    write(study)
    for number in (1, 2, 3):  # 1 is the baseline's best, 2 the normalised network's, 3 is none
        for norm in ("none", "hidden"):
            at = study.path / "trials" / f"{number:04d}"
            lr = {"lr": TRIALS[number]["settings"]["optimizer.lr"]}
            make_run(at, "ptb-char", norm, kind="char", name=norm, epochs=2, optimizer=lr)
    text = shown(study.path)
    words = Reader(text).words()
    assert "1 study, 4 runs of ptb-char" in words
    assert "Study char of ptb-char" in words
    assert "norm none: best validation loss 1.5000, trial 1 (lr 0.25, batch 32);" in words
    assert "in the form of the paper's Table 3" in words
    assert ">best norm hidden, paper</th><td>1.07</td><td>1.11</td>" in text
    assert "6 settings tried, 12 runs, 90 updates (without those of runs that broke off)" in words
    assert "the random sampler, none pruned. Epochs of a run: 3 of 5,000 tokens each." in words
    drawn = "0.001, 0.01, 0.25, 0.5, 0.75, 1.0"
    assert f"optimizer.lr</th><td>0.0001 to 1 log-uniform</td><td>{drawn}</td>" in text
    assert "train.batch</th><td>32, 64</td><td>32</td>" in text
    assert [h for h, _ in Reader(text).tags].count("h2") == 3
    for lr in ("0.25", "0.5"):
        assert f"ptb-char, optimizer.lr {lr}" in words
    assert "optimizer.lr 0.75" not in words


def test_every_trial_the_best_first() -> None:
    found = trials_table([*TRIALS, {**TRIALS[0], "trial": 6, "state": "pruned", "arms": {}}])
    assert found.head == ["trial", "lr", "batch", *(f"validation loss {a}" for a in NAMES)]
    assert [row[0] for row in found.rows] == ["1", "2", "4", "0", "3", "5", "6, pruned"]
    assert found.rows[1] == ["2", "0.5", "32", "diverged", "1.6250"]
    assert found.rows[-1][-2:] == ["–", "–"]


NAMES = ("baseline", "norm hidden")


def test_the_picture_takes_its_colours_from_both_themes(tmp_path: Path) -> None:
    text = shown(kept(tmp_path / "a", *LINES), kept(tmp_path / "b", *LINES))
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) <= {"#ffffff", "#000000"}
    assert not re.search(r"fill: #(ffffff|000000)(?!; opacity: 0|; stroke-opacity)", drawn)
    for colour in ("currentColor", "var(--grid)", "fill: var(--arm0)", "fill: var(--arm1)"):
        assert colour in drawn
    for theme in THEMES.values():
        assert f"--arm1: {theme['arm1']};" in text
    assert "http" not in text.lower()
    tags = Reader(text).tags
    assert {tag for tag, _ in tags} <= SVG | HTML
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = "".join(re.findall(r"<text.*?</text>", drawn, re.DOTALL))
    assert "learning rate" in labels
    assert "0.001" in labels
    assert "mathdefault" not in labels


def test_text_of_studies_is_text(tmp_path: Path) -> None:
    trial = {**TRIALS[0], "settings": {"optimizer.lr": 0.1, BAD: BAD}, "state": BAD}
    trial["arms"] = {BAD: TRIALS[0]["arms"]["none"], "$x^": TRIALS[0]["arms"]["hidden"]}
    study = kept(tmp_path / "<script>alert(1)<script>", json.dumps(trial))
    about = {**ABOUT, "space": {BAD: [BAD]}, "sampler": BAD, "pruner": BAD}
    about["config"] = {"recipe": BAD, "epochs": BAD}
    (study / "study.json").write_text(json.dumps(about))
    text = shown(study)
    assert "<script" not in text
    assert {tag for tag, _ in Reader(text).tags} <= SVG | HTML
    words = Reader(text).words()
    assert f"Study <script>alert(1)<script> of {BAD}" in words
    assert f"0, {BAD}" in words
    assert f"drawn by the {BAD} sampler, pruner {BAD}" in words
    assert (study / "trials.jsonl").exists()
    assert write(read_study(study))  # the picture's legend is not read as mathematics


def test_empty_partial_and_damaged_studies(tmp_path: Path) -> None:
    part = kept(tmp_path / "part", *LINES[:2])
    (part / "study.json").write_text(json.dumps(ABOUT))
    odd = kept(tmp_path / "odd", *LINES)
    (odd / "study.json").write_text('{"config": 3}')
    words_only = [line.replace('"optimizer.lr": ', '"optimizer.lr": "x", "y": ') for line in LINES]
    strange = kept(tmp_path / "strange", *words_only, LINES[0].replace(": 9}", ': "x"}'))
    (strange / "study.json").write_text('{"config": {"train": 3}, "space": 3, "trials": "x"}')
    nan = LINES[1].replace("1.5", "NaN")
    text = shown(
        kept(tmp_path / "empty"),
        part,
        odd,
        strange,
        kept(tmp_path / "torn", LINES[0], LINES[1][:40]),
        kept(tmp_path / "nan", LINES[0], nan, LINES[2]),
        kept(tmp_path / "other", "[]\n"),
    )
    words = Reader(text).words()
    assert "empty has no finished trials yet." in words
    assert "part has not finished: 2 of 6 trials are done." in words
    assert "torn is damaged: line 2 of trials.jsonl is no trial; the trials before that" in words
    assert "nan is damaged: line 2 of trials.jsonl is no trial; the trials before that" in words
    assert "other is damaged: line 1 of trials.jsonl is no trial." in words
    assert "The plan of the study (study.json) is not there." in words
    assert "nothing to show" not in words
    assert "0 settings tried, 0 runs" in words
    assert "Study strange 7 settings tried, 14 runs, 90 updates" in words


def test_the_papers_figures_stand_beside_the_papers_search_only() -> None:
    here = Path()
    assert RecordedStudy(here, TRIALS, ABOUT).paper
    assert not RecordedStudy(here, TRIALS, {**ABOUT, "config": {"recipe": "ptb-small"}}).paper
    assert not RecordedStudy(
        here, TRIALS
    ).paper  # nothing says what was searched, and no momentum was
    full = [{**t, "settings": {**t["settings"], "optimizer.momentum": 0.5}} for t in TRIALS]
    assert RecordedStudy(here, full).paper


def test_studies_and_runs_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "runs", norm="frame", until=450)
    study = kept(tmp_path / "studies" / "char", *LINES)
    make_run(study, "ptb-char", "hidden", kind="char", until=450)
    out, png = tmp_path / "report.html", tmp_path / "png"
    arguments = [run, tmp_path / "studies", study, "-o", out, "--png", png, "--markdown"]
    with pytest.raises(SystemExit) as exited:
        main(["report", *map(str, arguments)])
    assert exited.value.code == 0
    words = Reader(out.read_text()).words()
    assert "1 study, 2 runs of ptb-small, ptb-char" in words
    assert "Study char · ptb-small · ptb-char" in words
    said = capsys.readouterr().out
    assert "## Study char\n\n| model | train |" in said
    assert "## ptb-small" in said
    assert (png / "char-loss-by-learning-rate.png").read_bytes().startswith(b"\x89PNG")
    assert (png / "ptb-small-gap.png").exists()
    assert (
        markdown([], [RecordedStudy(study, [])])
        == "## Study char\n\nchar has no finished trials yet.\n"
    )
