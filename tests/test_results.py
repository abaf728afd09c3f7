"""docs/results and the tables of README and findings are those of results/."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from normrnn.verdicts.verdict import Figure
from tests.reporting.made_runs import make_run
from tests.reporting.test_study import TRIALS
from tools.claims import HIGHER, LOWER, judge, sign_test
from tools.collect import collect, collect_study
from tools.results import FINDINGS, INDEX, PAGES, stale, texts, write
from tools.tables import gradients_table

ROOT = Path(__file__).parent.parent
MARKS = {"README.md": ("results",), FINDINGS: ("claims", "questions", "statistics")}

LAYER = {
    "gradient": [1.0, 2.0, 4.0],
    "gradient_of_the_end": [0.5, 1.0, 2.0],
    "spread": [1.0, 1.0, 0.25],
    "growth_per_step": 0.5,
}
HIDDEN = LAYER | {"spread_before": [3.0, 4.0, 5.0], "mean_gamma": 0.125}
RECORDS = [
    {"label": "norm none", "loss": 2.0, "layers": {"l0": LAYER, "l0_reverse": LAYER}},
    {"label": "norm hidden", "loss": 1.5, "layers": {"l0": HIDDEN, "l1": HIDDEN}},
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with results of three recipes, not written yet."""
    root = tmp_path / "project"
    results = root / "results"
    for norm in ("none", "frame"):
        for seed in (1, 2, 3):
            make_run(results, "ptb-small-authors", norm, seed, segments=2)
        make_run(results, "ptb-medium", norm, epochs=2)
        make_run(results, "ptb-large", norm, until=100)
    make_run(results, "librispeech-mini", "none", kind="speech")
    (results / "NOTES.md").write_text("## Notes\nWhat differs.\n")
    (root / "docs").mkdir()
    for file, names in MARKS.items():
        marks = (f"<!-- {name}:begin -->\nold\n<!-- {name}:end -->\n" for name in names)
        (root / file).write_text(f"Words.\n{''.join(marks)}More words.\n")
    return root


def rows(text: str) -> list[list[str]]:
    return [[c.strip() for c in x.split(" | ")] for x in text.splitlines() if x.startswith("|")]


def test_committed_results_are_fresh() -> None:
    assert stale(ROOT) == [], "run `make results`"


def test_committed_pages_are_short() -> None:
    assert (ROOT / INDEX).stat().st_size <= 15_000
    for file in (INDEX, "README.md", FINDINGS):
        for row in rows((ROOT / file).read_text(encoding="utf-8")):
            for cell in row:
                assert len(re.sub(r"\]\(.*?\)", "", cell).split()) <= 15, cell


def test_no_paths_of_anybody_are_committed() -> None:
    for path in ROOT.glob("results/**/config.json"):
        assert "/" not in json.loads(path.read_text())["data"], path
    for path in ROOT.glob("results/studies/**/*.json*"):
        assert '"/' not in path.read_text(), path


def test_written_results_are_fresh_until_something_changes(project: Path) -> None:
    write(project)
    assert stale(project) == []
    picture = f"{PAGES}/ptb-small-authors.png"
    assert (project / picture).read_bytes().startswith(b"\x89PNG")
    readme = (project / "README.md").read_text()
    assert readme.startswith("Words.")
    assert readme.endswith("More words.\n")
    assert "old" not in readme
    (project / "results/NOTES.md").write_text("## Notes\nMore.\n")
    assert stale(project) == [f"{PAGES}/notes.md"]
    write(project)
    metrics = project / "results/ptb-medium-none-1/metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in lines:
        row["loss"] -= 1 if row["split"] == "valid" else 0
    metrics.write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert stale(project) == [INDEX, "RESULTS.md", FINDINGS, f"{PAGES}/ptb-medium.md"]
    write(project)
    (project / picture).unlink()
    assert stale(project) == [picture]


def test_one_row_per_comparison_and_claims_follow_the_answers(project: Path) -> None:
    written = texts(project)
    found = rows(written[INDEX])
    names = [re.sub(r"[|\[ ]*([\w-]+).*", r"\1", row[0]) for row in found[2:]]
    assert sorted(names) == ["ptb-large", "ptb-medium", "ptb-small-authors"]
    (authors,) = (row for row in found if "ptb-small-authors" in row[0])
    assert authors[2] == "3, 3"
    assert len(rows(written["README.md"])[2:]) == 1
    for name, at, answer in ("twice as fast", 2, "×"), ("medium", 3, "open"), ("large", 3, "open"):
        assert any(name in row[1] and answer in row[at] for row in rows(written[FINDINGS])), name


@pytest.mark.parametrize(
    ("answer", "expected", "verdict"),
    [
        ("better", LOWER, "reproduced"),
        ("better", HIGHER, "reversed"),
        ("worse", HIGHER, "reproduced"),
        ("equivalent", LOWER, "not reproduced"),
        ("not settled", LOWER, "open"),
        ("one seed", HIGHER, "open"),
    ],
)
def test_verdicts_on_claims(answer: Any, expected: str, verdict: str) -> None:
    assert judge(Figure("x", {1: 1.0}, {1: 1.0}, answer, 0.0), expected).split(":")[0] == verdict
    assert judge(None, expected).startswith("open")


def test_the_sign_test_by_hand() -> None:
    assert sign_test(5, 5) == sign_test(0, 5) == 2 / 32
    assert sign_test(2, 4) == 1
    assert sign_test(9, 10) == pytest.approx(22 / 1024)


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


def test_a_run_without_rows_is_collected(project: Path, tmp_path: Path) -> None:
    """It diverged in its first update."""
    run = make_run(tmp_path, "ptb-small", "frame")
    (run / "metrics.jsonl").unlink()
    (run / "diverged.txt").write_text("the gradient is nan at update 1\n")
    here = project / "studies" / "broken"
    target = collect(run, here=here)
    for norm, seed in (("none", 1), ("none", 2)):
        collect(make_run(tmp_path, "ptb-small", norm, seed), here=here)
    assert (target / "metrics.jsonl").read_text() == ""
    page = texts(project)[f"{PAGES}/broken.md"]
    assert "frame: 1 of 1 runs diverged" in page


def write_study(directory: Path, trials: list[dict[str, Any]]) -> Path:
    directory.mkdir(exist_ok=True)
    lines = [json.dumps(trial) + "\n" for trial in trials]
    (directory / "trials.jsonl").write_text("".join(lines))
    return directory


def test_studies_have_a_page(project: Path, tmp_path: Path) -> None:
    searched, here = write_study(tmp_path / "out", TRIALS), project / "results"
    about = {"trials": 6, "config": {"recipe": "ptb-char", "data_sha256": "ab"}}
    (searched / "study.json").write_text(json.dumps(about))
    assert collect_study(searched, "char", here).name == "char"
    study = here / "studies" / "char"
    for norm in ("none", "hidden"):
        collect(make_run(tmp_path, "ptb-char", norm, kind="char"), here=study)
    (study / "NOTES.md").write_text("What was *scaled down*.\n")
    (study / "gradients-best.json").write_text(json.dumps(RECORDS))
    page = texts(project)[f"{PAGES}/char.md"]
    cells = ("| hidden | 1.500 | 1.625 |", "| norm hidden, l1 | 1.500 |", "hidden, seed 1")
    for words in ("What was *scaled down*.", *cells):
        assert words in page
    (study / "trials.jsonl").write_text("{")
    with pytest.raises(SystemExit, match="damaged"):
        texts(project)


def test_a_study_is_collected_once_or_continued(tmp_path: Path) -> None:
    """Another study of the same name is refused."""
    collect_study(write_study(tmp_path / "out", TRIALS[:1]), "char", tmp_path / "here")
    other = write_study(tmp_path / "out", [{**TRIALS[0], "settings": {"optimizer.lr": 9.0}}])
    with pytest.raises(SystemExit, match="another study"):
        collect_study(other, "char", tmp_path / "here")


def test_table_of_gradients() -> None:
    lines = gradients_table(RECORDS).rows
    shown = "norm none, l0|2.000|0.500|2.0e+00|5.0e-01|–|1.00 … 0.25|–"
    assert lines[0] == shown.split("|")
    # A reverse layer's gradient starts at the first time step.
    assert lines[1][3:5] == ["5.0e-01", "2.0e+00"]
    assert lines[3][0] == "norm hidden, l1"
    assert lines[3][5:] == ["0.125", "1.00 … 0.25", "3.00 … 5.00"]
    broken = [{"label": "x", "loss": 9.0, "layers": {"l0": LAYER | {"spread": [9.5, 1.5e21]}}}]
    assert gradients_table(broken).rows[0][6] == "9.50 … 1.5e+21"
