"""The command line as a user meets it: answers, exit codes, one sentence for a mistake."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from normrnn.cli import COMMANDS, main
from normrnn.errors import UserError
from normrnn.experiments.training import load
from normrnn.recipes import RECIPES
from normrnn.runs.store import RunDirectory
from tests.commands.conftest import Cli
from tests.tiny_runs import note_of, rows_of, write_texts

SMALL = ["--model.hidden", "12", "--train.batch", "8", "--train.steps", "5", "--epochs", "2"]
SMALL += ["--train.log-every", "10", "--train.checkpoint-every", "20"]
SMALL += ["--evaluation.train-tokens", "200", "--evaluation.recalibrate-windows", "5"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, normalised frame-wise, trained once for all tests here."""
    data, out = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("runs") / "run"
    write_texts(data)
    call = ["train", "ptb-small", "--data", str(data), "--out", str(out), "--norm", "frame"]
    with pytest.raises(SystemExit) as exited:
        main([*call, *SMALL])
    assert exited.value.code == 0
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run; its text is the same as `text_dir`."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_help_comes_without_torch() -> None:
    code = "import sys; from normrnn.cli import main\ntry: main(sys.argv[1:])\n"
    code += "finally: print('torch' in sys.modules, file=sys.stderr)"
    for arguments in (["--help"], ["train", "ptb-small", "--help"]):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0
        assert done.stderr.strip() == "False"
        assert "usage: normrnn" in done.stdout


def test_help_names_what_there_is_and_what_a_command_takes(cli: Cli) -> None:
    _, said, _ = cli("--help")
    assert all(name in said for name in COMMANDS)
    for command in COMMANDS:
        code, out, _ = cli(command, "--help")
        assert (code, f"normrnn {command}" in out) == (0, True), command
    for arguments in (["recipes"], ["train", "--help"]):
        assert all(name in cli(*arguments)[1] for name in RECIPES)
    for command in ("train", "gradients"):
        assert f"normrnn {command} RUN_DIR" in cli(command, "--help")[1]
    for command in ("compare", "search"):
        words = cli(command, "ptb-char", "--help")[1].split()
        assert ("--norm" in words, "--norms" in words) == (False, True)


def test_words_are_completed() -> None:
    normrnn = f'normrnn() {{ {sys.executable} -m normrnn.cli "$@"; }}'
    for words, found in (
        ("normrnn compar", "compare"),
        ("normrnn compare ptb-ch", "ptb-char"),
        ("normrnn score --li", "--lines"),
    ):
        script = f'{normrnn}; eval "$(normrnn --completion)"; COMP_WORDS=({words});'
        script += ' COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _normrnn; echo "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [found]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage"),
        (["fly"], "no command 'fly'"),
        (["compere"], "did you mean compare?"),
        (["train"], "train needs a recipe"),
        (["train", "ptb-smal"], "did you mean ptb-small? There are: "),
        (["train", "ptb-small", "--norm", "batch"], "norm has 'batch', not one of none, sequence"),
        (["train", "ptb-small", "--colour", "red"], "--colour"),
        (["train", "ptb-small", "--epochs", "many"], "--epochs"),
        (["train", "ptb-small", "--model.hiden", "3"], "--model.hidden"),
        (["train", "wsj"], "prepared speech"),
        (["score", "run"], "FILE"),
        (["export", "run"], "--out PATH"),
        (["export", "run", "-o", "m.xyz"], ".pt, .safetensors, .onnx"),
        (["train", "ptb-small"], "pass --data DIR"),
        (["compare", "ptb-small", "--norm", "frame"], "--norms"),
        (["prepare", "wine"], "prepare needs one of ptb"),
        (["recipes", "please"], "please"),
        (["doctor", "--verbose"], "--verbose"),
        (["sample", "nowhere", "--temperature", "0"], "temperature must be positive"),
        (["sample", "nowhere", "--seed", str(2**64)], "seed must lie in"),
        (["evaluate", "nowhere", "--device", "abacus"], "no device 'abacus'"),
        (["evaluate", "nowhere", "--threads", "-1"], "threads must lie between 0 and"),
        (
            ["posteriors", "nowhere", "--data", "x", "--out", "y", "--threads", "-1"],
            "threads must lie between 0 and",
        ),
        (["train", "ptb-small", "--model.eps", "0"], "model.eps must be above 0, not 0"),
        (["gradients", "ptb-char", "--norms", "none,batch"], "--norms has 'batch', not one of"),
        (["gradients", "ptb-char", "--batches", "0"], "--batches must be at least 1, not 0"),
        (["gradients", "ptb-char", "-o", "g.png"], "g.png"),
        # What is missing exits with 1.
        (["train", "ptb-small", "--data", "nowhere"], "does not exist"),
        (["evaluate", "nowhere"], "is not a run directory"),
        (["score", "nowhere", __file__], "is not a run directory"),
        (["sample", "nowhere"], "is not a run directory"),
        (["prepare", "ptb", "nowhere"], "simple-examples.tgz"),
        (["train", "wsj", "--data", __file__], "Not a directory"),
    ],
)
def test_wrong_calls(cli: Cli, arguments: list[str], said: str) -> None:
    code, out, err = cli(*arguments)
    is_missing = said in ("does not exist", "is not a run directory", "simple-examples.tgz")
    assert code == (1 if is_missing or __file__ in arguments else 2)
    assert said in out + err
    if err.startswith("normrnn: ") and arguments not in (["fly"], ["train"]):
        assert len(err.strip().splitlines()) == 1  # those two show the whole usage


def test_texts_too_short_are_found_before_training(
    cli: Cli, text_dir: Path, tmp_path: Path
) -> None:
    call = ["train", "ptb-small", "--data", text_dir, "--out", tmp_path / "run", *SMALL]
    code, _, err = cli(*call, "--train.batch", "5000")
    assert code == 1
    assert "5000 streams" in err
    (text_dir / "test.txt").write_text("w1")
    (text_dir / "valid.txt").write_text("w2")
    assert cli(*call)[0] == 0
    (text_dir / "empty").mkdir()
    code, _, err = cli(*call, "--data", text_dir / "empty")
    assert code == 1
    assert "train.txt" in err


def test_run_directory_and_plain_lines(cli: Cli, text_dir: Path, run: Path) -> None:
    names = {"config.json", "metrics.jsonl", "model.safetensors", "checkpoint.pt"}
    assert names <= {path.name for path in run.iterdir()}
    config = json.loads((run / "config.json").read_text())
    assert (config["recipe"], config["norm"]) == ("ptb-small", "frame")
    assert config["model"]["hidden"] == 12
    same = ["train", "ptb-small", "--data", text_dir, "--out", run, "--norm", "frame", *SMALL]
    code, out, _ = cli(*same)
    assert code == 0
    assert "is finished" in out
    code, out, _ = cli(*same, "--epochs", "3")
    assert code == 0
    assert "epoch 3/3" in out
    assert " left" in out
    assert rows_of(run)[-1]["epoch"] == 3
    code, out, _ = cli("train", run)
    assert code == 0
    assert f"{run} is finished: 3 epochs" in out
    code, _, err = cli("train", text_dir)
    assert (code, "config.json" in err) == (1, True)


def test_changed_fields_are_refused_by_name(cli: Cli, text_dir: Path, run: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    given = ["--data", text_dir, "--out", run, "--norm", "frame", *SMALL]
    for name, words, said in (
        ("ptb-small", ["--seed", "2"], "seed was 1, is now 2"),
        ("ptb-small", ["--norm", "none"], "norm was frame, is now none"),
        ("ptb-small", ["--epochs", "1"], "epochs was 2, is now 1"),
        ("ptb-medium", [], "recipe was ptb-small, is now ptb-medium"),
    ):
        code, _, err = cli("train", name, *given, *words)
        assert (code, said in err) == (2, True), err
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_diverging_run_stops_and_keeps_its_checkpoint(
    cli: Cli, text_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "wild"
    call = ["train", "ptb-small", "--data", text_dir, "--out", out, *SMALL]
    call += ["--optimizer.lr", "1e36", "--optimizer.clip-norm", "0"]
    code, _, err = cli(*call, "--train.checkpoint-every", "1")
    assert code == 3
    assert "at update" in err
    note = note_of(out)
    assert f"at update {note.updates + 1}\n" in err


def test_evaluate_writes_its_own_file(cli: Cli, text_dir: Path, run: Path) -> None:
    metrics = (run / "metrics.jsonl").read_bytes()
    assert cli("evaluate", run)[0] == 0
    assert (run / "metrics.jsonl").read_bytes() == metrics
    result = json.loads((run / "evaluation.json").read_text())
    rows = {(r["split"], r["statistics"], r["streams"]): r for r in result["rows"]}
    saved = RunDirectory(run).model_metadata["statistics"]
    kinds = {saved, "recalibrated", "batch"}
    expected = {(split, kind, 8) for split in ("valid", "test") for kind in kinds}
    expected |= {("test", kind, 1) for kind in kinds - {"batch"}} | {("train_eval", saved, 8)}
    assert rows.keys() == expected
    counts = {row["count"] for key, row in rows.items() if key[0] == "test"}
    words = (text_dir / "test.txt").read_text().replace("\n", " <eos> ").split()
    assert counts == {len(words) - 1}
    # The best model as the run itself measured it.
    (best,) = (
        row["loss"]
        for row in rows_of(run)
        if (row["split"], row.get("statistics")) == ("best_valid", saved)
    )
    assert rows["valid", saved, 8]["loss"] == pytest.approx(best, rel=1e-6)
    test = next(r for r in rows_of(run) if r["split"] == "test" and r["statistics"] == "batch")
    assert rows["test", "batch", 8]["loss"] == pytest.approx(test["loss"], rel=1e-6)


def test_an_evaluation_that_is_not_kept_is_shown(
    cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another text, or where the file cannot be written."""
    other = tmp_path / "other"
    other.mkdir()
    write_texts(other)
    (other / "valid.txt").write_text((other / "test.txt").read_text())
    code, out, err = cli("evaluate", run, "--data", other)
    assert code == 0, err
    assert "perplexity" in out
    said = f"{other} is not what {run} was trained on: its evaluation.json is left alone"
    assert said in out
    assert not (run / "evaluation.json").exists()

    def full(*_: object) -> None:
        raise UserError("evaluation.json cannot be written: Permission denied")

    monkeypatch.setattr(RunDirectory, "write", full)
    code, out, err = cli("evaluate", run)
    assert (code, "recalibrated" in out, "Permission denied" in err) == (1, True, True)


def test_wild_models_are_evaluated_as_far_as_they_go(cli: Cli, text_dir: Path, run: Path) -> None:
    directory = RunDirectory(run)
    weights, header = directory.read_model()
    weights["decoder.weight"] *= 1e5  # more nats per token than exp can take
    directory.write_model(weights, header)
    (run / "checkpoint.pt").unlink()  # which knows another model
    code, *_ = cli("evaluate", run)
    assert code == 0
    rows = json.loads((run / "evaluation.json").read_text())["rows"]
    assert max(row["loss"] for row in rows) > 710
    assert cli("score", run, text_dir / "test.txt", "--lines")[0] == 0


def test_sequence_wise_batch_statistics_are_refused(
    cli: Cli, text_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "sequence"
    call = ["train", "ptb-small", "--data", text_dir, "--out", out, "--norm", "sequence", *SMALL]
    assert cli(*call)[0] == 0
    assert {row.get("statistics") for row in rows_of(out)} == {None, "running", "recalibrated"}
    code, shown, _ = cli("evaluate", out, "--no-one-stream")
    assert code == 0
    assert "batch statistics" in shown
    result = json.loads((out / "evaluation.json").read_text())
    assert {row["statistics"] for row in result["rows"]} == {"running", "recalibrated"}


def test_score_reads_every_line(cli: Cli, run: Path, tmp_path: Path) -> None:
    text = tmp_path / "new.txt"
    text.write_text("w1 w3 w9\nw2 strange w6\n")
    code, out, _ = cli("score", run, text, "--lines")
    assert code == 0
    first, second, summary = out.splitlines()
    assert first.split("\t")[1:] == ["4", "w1 w3 w9"]
    assert second.split("\t")[1:] == ["4", "w2 strange w6"]
    assert "8 tokens (1 <unk>)" in summary
    model: Any = load(run)
    assert model.vocabulary is not None
    index = model.vocabulary.index
    words = ["<eos>", "w1", "w3", "w9", "<eos>", "w2", "<unk>", "w6", "<eos>"]
    ids = torch.tensor([index[word] for word in words])
    with torch.no_grad():
        logits, _ = model(ids[:-1, None])
    nats = -torch.log_softmax(logits[:, 0], 1)[range(8), ids[1:]]
    assert f"perplexity {nats.mean().exp().item():,.2f}" in summary
    assert first.split("\t")[0] == f"{nats[:4].mean().exp().item():.2f}"


def test_sample_goes_on_from_the_prompt(cli: Cli, run: Path) -> None:
    call = ["sample", run, "--tokens", "12", "--seed", "5", "--prompt", "w1 w3"]
    code, out, _ = cli(*call)
    assert code == 0
    assert out.startswith("w1 w3")
    assert cli(*call)[1] == out
    drawn = out.replace("\n", " <eos> ").split()[2:]
    assert len(drawn) in (12, 13)  # the newline that `print` adds reads as one more
