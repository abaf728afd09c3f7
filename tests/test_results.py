"""RESULTS.md, the README's results and their pictures are those of results/."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from normrnn.report.paired import Difference
from tests.report.made_runs import make_run
from tests.report.test_gradients import RECORDS
from tests.report.test_study import TRIALS
from tools.collect import collect, collect_study
from tools.findings import HIGHER, LOWER, judged
from tools.results import (
    FINDINGS,
    PICTURE,
    STUDIES,
    experiments,
    inputs_hash,
    results_md,
    stale,
    texts,
    write,
)

ROOT = Path(__file__).parent.parent
README = "<!-- picture:begin -->\n<!-- picture:end -->\nWords.\n<!-- results:begin -->\nold\n"
FINDINGS_PAGE = "Claims:\n<!-- findings:begin -->\n<!-- findings:end -->\n"
FINDINGS_PAGE += "<!-- answers:begin -->\n<!-- answers:end -->\nSo.\n"
README += "<!-- results:end -->\nMore words.\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with results of three recipes, not written yet."""
    root = tmp_path / "project"
    results = root / "results"
    for norm in ("none", "frame"):
        for seed in (1, 2, 3):
            make_run(results, "ptb-small-authors", norm, seed, segments=2)
        make_run(results, "ptb-medium", norm, epochs=2)
        large = make_run(results, "ptb-large", norm, until=100)
        (large / "environment.json").write_text('[{"cpu": "one of ours"}]')
    make_run(results, "librispeech-mini", "none", kind="speech")
    (results / "NOTES.md").write_text("## Notes\nWhat differs.\n")
    (root / "README.md").write_text(README)
    (root / "RESULTS.md").write_text("")
    (root / "docs").mkdir()
    (root / FINDINGS).write_text(FINDINGS_PAGE)
    return root


@pytest.fixture
def quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures that take no time: what they look like is tested elsewhere."""

    def touch(_: object, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")

    monkeypatch.setattr("tools.results.figure", lambda _: None)
    monkeypatch.setattr("tools.results.study_figure", lambda _: None)
    monkeypatch.setattr("tools.results.gradients.figure", lambda _: None)
    monkeypatch.setattr("tools.results.headline", lambda _: None)
    monkeypatch.setattr("tools.results.save", touch)


def test_committed_results_are_fresh() -> None:
    assert stale(ROOT) == [], "run `make results`"
    assert f"<!-- inputs: sha256 {inputs_hash(ROOT)} -->" in (ROOT / "RESULTS.md").read_text()


def test_no_paths_of_anybody_are_committed() -> None:
    for path in ROOT.glob("results/**/config.json"):
        assert "/" not in json.loads(path.read_text())["data"], path
    for path in ROOT.glob("results/studies/**/*.json*"):
        assert '"/' not in path.read_text(), path


def test_results_are_written_with_pictures(project: Path) -> None:
    write(project)
    assert (project / PICTURE).read_bytes().startswith(b"\x89PNG")
    links = re.findall(r"!\[.*?\]\((.*?)\)", (project / "RESULTS.md").read_text())
    assert len(links) == 3  # none of ptb-large, which has not finished an epoch
    for link in links:
        assert (project / link).read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("quick_pictures")
def test_written_results_are_fresh_until_something_changes(project: Path) -> None:
    assert stale(project)[:3] == ["RESULTS.md", "README.md", FINDINGS]
    write(project)
    assert stale(project) == []
    readme = (project / "README.md").read_text()
    assert "Words." in readme
    assert "More words." in readme
    assert "old" not in readme

    notes = project / "results/NOTES.md"
    notes.write_text(notes.read_text() + "More.\n")
    assert stale(project) == ["RESULTS.md"]
    write(project)
    metrics = project / "results/ptb-medium-none-1/metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    valid = next(i for i, row in enumerate(rows) if row["split"] == "valid")
    rows[valid]["loss"] -= 1
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert stale(project) == ["RESULTS.md", "README.md", FINDINGS]
    write(project)
    (project / PICTURE).unlink()
    assert stale(project) == [PICTURE]


@pytest.mark.usefixtures("quick_pictures")
def test_a_change_that_no_table_shows_is_seen_by_the_hash(project: Path) -> None:
    write(project)
    metrics = project / "results/ptb-medium-none-1/metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"grad_norm": 5', '"grad_norm": 6', 1))
    assert stale(project) == ["RESULTS.md"]


def test_how_far_is_judged_by_the_recipe(project: Path) -> None:
    text = results_md(project)
    assert "| Medium LSTM | 2 of 40 |" in text
    assert "| Large LSTM | 100 updates |" in text
    assert "| Small LSTM (BN) | all 5 |" in text
    assert "In 100 updates the normalised network processed" in text
    assert next(group.recipe for group in experiments(project)) == "ptb-small-authors"


def test_every_seed_and_what_they_say(project: Path) -> None:
    text = results_md(project)
    for seed in (1, 2, 3):
        assert f"| frame, seed {seed} | all 5 |" in text
    assert "3 paired seeds. To reach the baseline's best training loss of" in text
    assert "| best perplexity | " in text
    (row,) = (
        x for x in texts(project)["README.md"].splitlines() if x.startswith("| ptb-small-authors")
    )
    assert row.split(" | ")[1] == "3"
    assert re.search(r"\| perplexity [\d.]+, [\d.]+ \| \+0.7 \(-2.8 to \+4.3\): no difference", row)
    assert row.endswith("| 119.2, 120.9 |")


def test_findings_follow_the_seeds(project: Path) -> None:
    """Of five seeds the interval decides, of one the sign; what was not run says so."""
    page = texts(project)[FINDINGS]
    assert page.startswith("Claims:\n")
    assert page.endswith("\nSo.\n")
    page = page.split("<!-- answers:begin -->")[0]
    rows = [[cell.strip() for cell in x.split("|")[1:-1]] for x in page.splitlines() if "|" in x]
    found = {(row[0], row[1].split(" (")[0]): row[2:] for row in rows}
    faster = found["Figure 2, section 6", "words: training is faster"]
    assert faster[2:] == ["found again", "[3 seeds](../RESULTS.md#ptb-small-authors)"]
    assert faster[1].startswith("-3")
    assert faster[1].count("%") == 3
    medium = found["Table 2, medium", "words: a little worse on validation"]
    assert medium[2].endswith("(one seed), 2 of 40 epochs")
    assert found["Table 2, large; Figure 2", "words: much better in training"][2] == "not run"
    assert found["Table 3", "the best networks of a search are similar"][2] == "not run"


def test_questions_past_the_paper(project: Path) -> None:
    """Another normalisation by its interval; one that looks ahead has no training loss to reach."""
    asked = "words: layer normalisation"
    assert _answers(project)[asked][:4] == ["–", "–", "–", "not run"]
    for norm in ("layer", "sequence"):
        for seed in (1, 2, 3):
            make_run(project / "results", "ptb-small-authors", norm, seed, segments=2)
    layer = _answers(project)[asked]
    assert re.fullmatch(r"[+-][\d.]+% \([+-][\d.]+% to [+-][\d.]+%\)", layer[0])
    assert re.fullmatch(r"[\d.]+, [\d.]+", layer[1])
    assert layer[3] in ("better", "worse", "no difference seen")
    assert layer[4] == "[3 seeds](../RESULTS.md#ptb-small-authors)"
    assert _answers(project)["words: sequence-wise"][0] == "–"
    assert _answers(project)["words, regularised: frame-wise"][3] == "not run"
    # In every made-up run recalibrated statistics are 0.02 nats below running ones.
    tested = _answers(project)["words: recalibrated statistics, in the place of running ones"]
    running, recalibrated = map(float, tested[1].split(", "))
    assert recalibrated == pytest.approx(running * math.exp(-0.02), abs=0.1)
    assert tested[3] == "better"
    assert _answers(project)["a small text: the same"][3] == "not run"


def test_statistics_by_their_place_in_an_epoch(project: Path) -> None:
    """Recalibrated ones are 0.02 nats below running ones, and in the middles of epochs, as changed
    here, 0.03 above."""
    for file in (project / "results").glob("ptb-small-authors-frame-*/metrics.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        ends = {row["epoch"]: row["updates"] for row in rows if row["split"] == "valid"}
        for row in rows:
            changed = row["split"] == "valid" and row["statistics"] == "recalibrated"
            row["loss"] += 0.05 * (changed and row["updates"] != ends[row["epoch"]])
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for where, nats, answer in (("ends", -0.02, "better"), ("middles", 0.03, "worse")):
        found = _answers(project)[f"words: the same, mean over the {where} of epochs"]
        running, recalibrated = map(float, found[1].split(", "))
        assert recalibrated == pytest.approx(running * math.exp(nats), abs=0.1)
        assert found[3] == answer


def _answers(project: Path) -> dict[str, list[str]]:
    page = texts(project)[FINDINGS].split("<!-- answers:begin -->")[1]
    rows = [[cell.strip() for cell in x.split("|")[1:-1]] for x in page.splitlines() if "|" in x]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize(
    ("others", "expected", "answer"),
    [
        ((1.0,), LOWER, "found again (one seed)"),
        ((3.0,), LOWER, "turned round (one seed)"),
        ((2.0,), LOWER, "not found (one seed)"),
        ((1.0, 1.1, 0.9), LOWER, "found again"),
        ((1.0, 1.1, 0.9), HIGHER, "turned round"),
        ((1.0, 3.0, 2.1), HIGHER, "not found"),
    ],
)
def test_verdicts_on_claims(others: tuple[float, ...], expected: int, answer: str) -> None:
    seeds = tuple(range(len(others)))
    assert judged(Difference(seeds, (2.0,) * len(others), others), expected) == answer


def test_collect_keeps_other_runs(project: Path, tmp_path: Path) -> None:
    here = project / "results"
    run = make_run(tmp_path, "ptb-small", "frame", model={"hidden": 200})
    (run / "environment.json").write_text("[]")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"torn')
    target = collect(run, here=here)
    assert target == here / "ptb-small-frame-1"
    assert "torn" not in (target / "metrics.jsonl").read_text()
    assert json.loads((target / "config.json").read_text())["data"] == "mine"
    assert (target / "environment.json").exists()
    shutil.rmtree(run)
    other = make_run(tmp_path, "ptb-small", "frame", model={"hidden": 100, "younger": 1})
    with pytest.raises(SystemExit, match=r"holds another run \(model\): give a --suffix"):
        collect(other, here=here)
    assert collect(other, "narrow", here).name == "ptb-small-frame-1-narrow"
    shutil.rmtree(other)
    longer = make_run(tmp_path, "ptb-small", "frame", epochs=9, model={"hidden": 200, "new": 1})
    assert collect(longer, here=here) == target
    collect(longer, here=here, epochs=2)
    assert json.loads((target / "config.json").read_text())["epochs"] == 2
    rows = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
    assert {row["epoch"] for row in rows} == {1, 2}


def _searched(parent: Path, trials: list[dict[str, Any]]) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(trial) + "\n" for trial in trials)
    (parent / "trials.jsonl").write_text("".join(lines))
    about = {"trials": 6, "config": {"recipe": "ptb-char", "data_sha256": "ab"}}
    (parent / "study.json").write_text(json.dumps(about))
    return parent


@pytest.mark.usefixtures("quick_pictures")
def test_studies_stand_after_the_experiments(project: Path, tmp_path: Path) -> None:
    here = project / "results"
    assert STUDIES not in results_md(project)
    assert collect_study(_searched(tmp_path / "out", TRIALS), "char", here).name == "char"
    for norm in ("none", "hidden"):
        run = make_run(tmp_path, "ptb-char", norm, kind="char")
        target = collect(run, here=here / "studies" / "char")
        assert target == here / "studies" / "char" / f"ptb-char-{norm}-1"
        assert json.loads((target / "config.json").read_text())["data"] == "mine"
    (here / "studies" / "char" / "NOTES.md").write_text("What was *scaled down*.\n")
    (here / "studies" / "char" / "gradients-best.json").write_text(json.dumps(RECORDS))
    write(project)
    text = (project / "RESULTS.md").read_text()
    _, appendix = text.split(STUDIES)
    assert "### char\n\nWhat was *scaled down*." in appendix
    assert "| best norm hidden | 1.500 | 1.625 | 2.344 | 0.5 | 32 |" in appendix
    assert "| best norm hidden, paper | 1.07 | 1.11 | 1.60 | 0.000371 | 128 |" in appendix
    assert "- norm none: best validation loss 1.5000, trial 1 (lr 0.25, batch 32);" in appendix
    assert "No saving: the network normalised inside the recurrence" in appendix
    assert "| norm hidden, l1 | 1.500 | 0.500 |" in appendix
    assert "on its way back** (gradients-best.json)" in appendix
    links = re.findall(r"!\[.*?\]\((.*?)\)", appendix)
    which = ("", "-ptb-char", "-gradients-best")
    assert links == [f"docs/pictures/study-char{more}.png" for more in which]
    assert "ptb-char" not in (project / "README.md").read_text()

    assert stale(project) == []
    (project / links[0]).unlink()
    assert stale(project) == [links[0]]
    write(project)
    for name, old, new in (
        ("trials.jsonl", "is nan", "is inf"),
        ("study.json", "ab", "cd"),
        ("NOTES.md", ".", ".\n"),
        ("gradients-best.json", "4.0", "4.5"),
        ("ptb-char-none-1/metrics.jsonl", '"grad_norm": 5', '"grad_norm": 6'),
    ):
        path = here / "studies" / "char" / name
        before = path.read_text()
        assert old in before
        path.write_text(before.replace(old, new))
        assert stale(project) == ["RESULTS.md"], name
        path.write_text(before)
    assert stale(project) == []
    (here / "studies" / "char" / "trials.jsonl").write_text("{")
    with pytest.raises(SystemExit, match="char is damaged: line 1"):
        stale(project)


@pytest.mark.usefixtures("quick_pictures")
def test_a_study_of_runs_is_one_table(project: Path, tmp_path: Path) -> None:
    """The same recipe at several learning rates; a curve where there are arms to compare."""
    place = project / "results" / "studies" / "rates"
    for lr, norms in ((1.0, ("none", "frame")), (2.0, ("none",))):
        for norm in norms:
            run = make_run(tmp_path / str(lr), norm=norm, optimizer={"lr": lr})
            collect(run, f"lr-{lr}", place)
    write(project)
    _, text = (project / "RESULTS.md").read_text().split("### rates")
    assert text.count("| Model |") == 1
    head = next(line for line in text.splitlines() if line.startswith("| Model |"))
    assert "paper" not in head  # its figures are of one setting
    assert head.count("|") == 7
    assert text.count("| Small LSTM · ptb-small, optimizer.lr 1.0 |") == 1
    assert text.count("| Small LSTM (BN) · ptb-small, optimizer.lr 1.0 |") == 1
    assert text.count("| Small LSTM · ptb-small, optimizer.lr 2.0 |") == 1
    assert (
        "**ptb-small, optimizer.lr 1.0.** One seed, which says nothing in general. To reach" in text
    )
    assert "no normalised run" not in text
    links = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert links == ["docs/pictures/study-rates-ptb-small--optimizer.lr-1.0.png"]


def test_another_study_is_not_collected_over_one(tmp_path: Path) -> None:
    collect_study(_searched(tmp_path / "a", TRIALS[:4]), "char", tmp_path)
    metrics = tmp_path / "a" / "trials" / "0000" / "none" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"loss": 1}\n{"torn')
    target = collect_study(_searched(tmp_path / "a", TRIALS), "char", tmp_path)
    assert len((target / "trials.jsonl").read_text().splitlines()) == 6
    kept = [json.loads(line) for line in (target / "trials.jsonl").read_text().splitlines()]
    assert [trial["rows"] for trial in kept[:2]] == [{"none": [{"loss": 1}]}, {}]
    assert sorted(path.name for path in target.iterdir()) == ["study.json", "trials.jsonl"]
    other = [{**TRIALS[0], "settings": {"optimizer.lr": 0.5}}]
    with pytest.raises(SystemExit, match="holds another study"):
        collect_study(_searched(tmp_path / "b", other), "char", tmp_path)
    changed = _searched(tmp_path / "d", TRIALS)
    about = json.loads((changed / "study.json").read_text())
    (changed / "study.json").write_text(json.dumps({**about, "norms": ["none", "frame"]}))
    with pytest.raises(SystemExit, match="holds another study"):
        collect_study(changed, "char", tmp_path)
    with pytest.raises(SystemExit, match="has no trials"):
        collect_study(_searched(tmp_path / "c", []), "new", tmp_path)
    assert not (tmp_path / "studies" / "new").exists()
