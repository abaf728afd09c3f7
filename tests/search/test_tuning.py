"""`compare --tune`: each arm at its own best, and what finding that cost."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from normrnn import verdict
from normrnn.config.base import Config
from normrnn.errors import UserError
from normrnn.experiments.jobs import RunJob, plan
from normrnn.experiments.search import SEED_OFFSET, plan_tuning, summarise, tune_setting
from normrnn.processes import DIVERGED
from normrnn.recipes import recipe
from normrnn.reporting.study import RecordedStudy, read_study
from tests.commands.conftest import Cli, cli

__all__ = ["cli"]

NORMS = ("none", "frame")


@pytest.fixture
def config() -> Config:
    return replace(recipe("ptb-small"), data="text", epochs=3, seed=5)


def test_what_is_tried_unless_said(config: Config) -> None:
    tuned, space = plan_tuning(config, "optimizer.lr")
    assert space == {"optimizer.lr": [0.333, 1.0, 3.0]}
    assert (tuned.epochs, tuned.seed) == (3, 5 + SEED_OFFSET)  # none of the seeds compared
    tuned, _ = plan_tuning(config, {"optimizer.lr": (1, 2.0), "epochs": 2})
    assert tuned.epochs == 2
    for field, values, read in (
        ("train.batch", ("16", "32"), [16, 32]),
        ("optimizer.lr", (1, 2, 1), [1.0, 2.0]),
        ("model.gamma", ("0.1", "1"), [0.1, 1.0]),  # None so far
        ("optimizer.name", ("sgd", "adam"), ["sgd", "adam"]),
    ):
        assert plan_tuning(config, {field: values})[1][field] == read
    assert plan_tuning(config, "lr")[1].keys() == {"optimizer.lr"}
    with pytest.raises(UserError, match="one setting"):
        plan_tuning(config, {"optimizer.lr": (), "train.batch": ()})


@pytest.mark.parametrize(
    ("field", "values", "said"),
    [
        ("optimizer.rate", "", "optimizer.rate"),
        ("train.batch", "", "--tune train.batch needs --tune-values with at least 2 values: 32,"),
        ("optimizer.momentum", "", "needs --tune-values"),  # 0: three times it is the same
        ("optimizer.lr", "1", "at least 2 values"),
        ("optimizer.lr", "1,fast", "optimizer.lr is 'fast', not float"),
        ("train.batch", "16,32.5", "train.batch is 32.5, not int"),
        ("train.batch", "16,0", "train.batch"),
        ("norm", "none,frame", "norm"),
        ("seed", "1,2", "seed"),
        ("epochs", "1,2", "one setting"),
        ("text.max_vocab", "4,2000", "text.max_vocab"),
        ("evaluation.tokens", "10,20", "evaluation.tokens"),
    ],
)
def test_what_cannot_be_tuned(config: Config, field: str, values: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        plan_tuning(config, {field: [v for v in values.split(",") if v]})
    assert raised.value.code == 2


def test_what_was_tried_and_chosen_in_words(tmp_path: Path) -> None:
    def trial(lr: float, none: float, frame: float) -> dict:
        arms = {"none": none, "frame": frame}
        found = {k: {"diverged": False, "loss": v, "updates": 500} for k, v in arms.items()}
        return {"settings": {"optimizer.lr": lr}, "arms": found}

    trials = [trial(0.5, 5.0, 5.0), trial(1.0, 4.0, 4.5), trial(2.0, 4.5, 4.0)]
    trials[2]["arms"]["none"] = {"diverged": True, "loss": None}
    study = RecordedStudy(tmp_path, trials, {"space": {"optimizer.lr": [0.5, 1.0, 2.0]}})
    chosen = {"none": trials[1]["settings"], "frame": trials[2]["settings"]}
    text = summarise(study, chosen, 3, 3)
    for words in ("0.5, 1.0, 2.0", "epochs: 3", "6 runs", "2,500 updates", "1.0, frame 2.0 (at"):
        assert words in text
    assert "3 of 10 epochs" in summarise(study, chosen, 3, 10)


def test_an_arm_that_never_trains_is_an_error(config: Config, tmp_path: Path) -> None:
    space = {"optimizer.lr": [1.0, 2.0]}

    class Runner:
        def train(self, jobs: Sequence[RunJob]) -> None:
            for job in jobs:
                job.out.mkdir(parents=True)
                (job.out / "config.json").write_text('{"norm": "none", "seed": 1}')
                job.ended, job.reason = DIVERGED, "the loss is nan at update 3"

    with pytest.raises(UserError, match=r"no value of optimizer\.lr trained with norm none"):
        tune_setting(config, space, plan(config, ["none"], 1, tmp_path), Runner())  # type: ignore[arg-type]
    (first, _) = read_study(tmp_path / "tuning").trials
    assert first["arms"]["none"]["reason"] == "the loss is nan at update 3"


@pytest.mark.slow
def test_from_the_command_line(cli: Cli, text_dir: Path, tmp_path: Path) -> None:
    """A rate at which nothing trains is a finding, and the other one is taken."""
    out = tmp_path / "out"
    settings = ["--model.hidden", "8", "--train.batch", "8", "--train.steps", "5", "--epochs", "1"]
    settings += ["--evaluation.train-tokens", "0", "--tune", "optimizer.lr", "--target", "1000"]
    code, said, err = cli(
        *("compare", "ptb-small", "--data", text_dir, "--out", out, *settings),
        *("--tune-values", "1,1e38"),
    )
    assert code == 0, err
    words = " ".join(said.split())
    assert "tuning optimizer.lr: 4 runs, epochs: 1" in words
    assert "values 1.0, 1e+38; epochs: 1; 2 settings, 4 runs" in words
    assert "Chosen: none 1.0 (at the edge of what was tried), frame 1.0" in words
    for norm in NORMS:
        run = json.loads((out / f"{norm}-1" / "config.json").read_text())
        assert (run["optimizer"]["lr"], run["seed"]) == (1.0, 1)
    study = read_study(out / "tuning")
    assert [t["arms"]["none"]["diverged"] for t in study.trials] == [False, True]
    assert study.runs() == []  # they are not compared
    html = (out / "report.html").read_text()
    assert "2 settings, 4 runs" in html
    assert "Chosen: none 1.0 (at the edge of what was tried), frame 1.0" in html
    (one,) = verdict([out / f"{norm}-1" for norm in NORMS]).variants.values()
    assert one.quality is not None
    assert one.quality.seeds == 1
    code, _, err = cli("compare", "ptb-small", "--data", text_dir, "--tune-epochs", "2")
    assert (code, err) == (2, "normrnn: --tune-values and --tune-epochs need --tune FIELD\n")
