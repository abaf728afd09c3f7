"""Reports, studies and searches: what is damaged or cannot be verified is said."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from normrnn.errors import UserError
from normrnn.files import read_json
from normrnn.reporting.runs import examine, load
from normrnn.reporting.study import RecordedStudy, find_studies, read_study, write
from normrnn.text.config import LanguageConfig
from tests.safety.conftest import Cli
from tests.safety.test_run_integrity import edit, flip
from tests.tiny_runs import run_tiny

ARMS = [{"none": {"diverged": False, "loss": 1.0 + n, "train": 0.5}} for n in range(3)]
TRIALS = [
    {"trial": n, "state": "complete", "settings": {"optimizer.lr": 0.1 * (n + 1)}, "arms": arms}
    for n, arms in enumerate(ARMS)
]
ABOUT = {"study": "s", "trials": 3, "config": {"recipe": "ptb-char"}}


def changed(run: Path, key: str, value: object) -> None:
    config = json.loads((run / "config.json").read_text())
    edit(key, value)(config)
    (run / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("key", "value"), [("seed", 3), ("optimizer.lr", 0.8), ("seed", True), ("norm", "frame")]
)
def test_a_changed_config_is_in_no_verdict(key: str, value: object, run: Path) -> None:
    changed(run, key, value)
    with pytest.raises(UserError, match=f"{key} was"):
        examine(run)


def test_epochs_may_be_ahead_of_the_checkpoint(run: Path) -> None:
    changed(run, "epochs", 7)
    assert load(run).config["epochs"] == 7


def test_a_damaged_checkpoint_does_not_accuse_the_config(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = (run / "checkpoint.pt").read_bytes()
    (run / "checkpoint.pt").write_bytes(content.replace(b'"seed": 1', b'"seed": 2'))
    assert load(run).seed == 1
    assert "1 of 1 runs have no checksums" in caplog.text


def test_runs_without_checksums_are_named_once(
    cli: Cli, run: Path, tiny: LanguageConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_tiny(replace(tiny, seed=2), tmp_path / "other")
    code, _, _ = cli("report", run, "--out", tmp_path / "r.html")
    assert (code, caplog.messages) == (0, [])
    for path in (run, tmp_path / "other"):
        (path / "checkpoint.pt").unlink()
    code, _, _ = cli("report", run, tmp_path / "other", "--out", tmp_path / "r.html")
    assert code == 0
    assert caplog.messages == ["2 of 2 runs have no checksums: not verified"]


def test_missing_rows_are_noticed(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        load(run)


def test_where_a_run_ran(run: Path, tiny: LanguageConfig, caplog: pytest.LogCaptureFixture) -> None:
    path = run / "environment.json"
    expected, _ = read_json(path, list)
    good = path.read_bytes()
    for seed in range(60):
        flip(path, random.Random(seed))
        caplog.clear()
        found = examine(run)
        assert found.environments == expected or found.notices or not found.verified
        path.write_bytes(good)
    flip(path, random.Random(0))
    for name in ("config.json", "checkpoint.pt", "model.safetensors", "metrics.jsonl"):
        (run / name).unlink()
    run_tiny(tiny, run)
    assert "environment.json is damaged" in caplog.text
    assert read_json(path, list)[0] == expected


@pytest.mark.parametrize("name", ["trials.jsonl", "study.json"])
def test_a_flipped_bit_in_a_study(name: str, tmp_path: Path) -> None:
    write(RecordedStudy(tmp_path, TRIALS, ABOUT))
    good = (tmp_path / name).read_bytes()
    read = read_study(tmp_path)
    assert (read.trials, read.about, read.problem, read.verified) == (TRIALS, ABOUT, "", True)
    for seed in range(60):
        flip(tmp_path / name, random.Random(seed))
        read = read_study(tmp_path)
        assert read.problem or not read.verified
        (tmp_path / name).write_bytes(good)
    (tmp_path / "trials.jsonl").write_text("".join(json.dumps(t) + "\n" for t in TRIALS))
    read = read_study(tmp_path)
    assert (read.trials, read.problem, read.verified) == (TRIALS, "", False)


def test_a_study_without_its_settings_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(RecordedStudy(tmp_path, TRIALS, ABOUT))
    find_studies([tmp_path])
    assert not caplog.text
    (tmp_path / "study.json").unlink()
    ((study,), _) = find_studies([tmp_path])
    assert (study.trials, study.about) == (TRIALS, {})
    assert f"{tmp_path / 'study.json'} is missing" in caplog.text


def test_a_search_does_not_resume_over_damaged_results(
    cli: Cli, text_dir: Path, tmp_path: Path
) -> None:
    write(RecordedStudy(tmp_path / "o", TRIALS, ABOUT))
    (tmp_path / "o" / "trials.jsonl").write_text("{}\n")
    code, _, err = cli("search", "ptb-char", "--data", text_dir, "--out", tmp_path / "o")
    assert code == 1
    assert "line 1 is not a trial: remove that" in err
