"""Runs exported by the command line: cards, snippets where this library is not, hostile files."""

import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import yaml

import normrnn
from normrnn.deploy.info import info
from normrnn.errors import UserError
from normrnn.text.config import LanguageConfig
from tests.commands.conftest import Cli, cli
from tests.deploy.exported import SUFFIXES, log_posteriors, logits
from tests.tiny_runs import run_tiny

__all__ = ["cli"]

OLD = Path(__file__).parents[1] / "old_runs"


def code(card: str) -> str:
    (block,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return block


def alone(program: str, folder: Path, *without: str) -> str:
    """What a program prints where these modules are not."""
    block = f"import sys\nfor name in {without!r}: sys.modules[name] = None\n"
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", block + program],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("form", ["torch", "safetensors", "onnx"])
def test_snippets_run_without_this_library(form: str, cli: Cli, tmp_path: Path) -> None:
    missing = ["normrnn", "torch"] if form == "onnx" else ["normrnn"]
    for kind, result, shape in (("text", "logits", [5, 2, 26]), ("speech", "log_posteriors", 3)):
        out = tmp_path / kind
        exit_code, said, _ = cli("export", OLD / kind, "-o", out, "--format", form)
        assert exit_code == 0
        card = (out / "README.md").read_text()
        assert code(card) in said
        printed = alone(f"{code(card)}\nprint(list({result}.shape))", out, *missing)
        assert json.loads(printed) == shape or len(json.loads(printed)) == shape


@pytest.mark.slow
def test_a_programs_snippet(cli: Cli, tmp_path: Path) -> None:
    assert cli("export", OLD / "speech", "-o", tmp_path / "p", "--format", "program")[0] == 0
    card = (tmp_path / "p" / "README.md").read_text()
    program = f"{code(card)}\nprint(log_posteriors.shape[:2])"
    assert "50, 2" in alone(program, tmp_path / "p", "normrnn")


def test_the_card(cli: Cli, tmp_path: Path) -> None:
    cli("export", OLD / "text", "-o", tmp_path / "out", "--format", "onnx")
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["pipeline_tag"] == "text-generation"
    assert (front["library_name"], front["metrics"]) == ("normrnn", ["perplexity"])
    (entry,) = front["model-index"]
    row = next(
        row
        for row in json.loads((OLD / "text" / "evaluation.json").read_text())["rows"]
        if (row["split"], row["statistics"]) == ("valid", "running")
    )
    (metric,) = entry["results"][0]["metrics"]
    assert metric["value"] == pytest.approx(torch.tensor(row["loss"]).exp().item(), rel=1e-4)
    assert metric["name"] == "valid, running statistics"
    assert "/tmp/old_runs" not in card  # where the data lay
    for path in (tmp_path / "out", tmp_path / "out" / "model.onnx", tmp_path / "out" / "README.md"):
        assert cli("info", path)[1] == card
    run = cli("info", OLD / "text")[1]
    assert "| valid | running |" in run
    assert "How to load" not in run
    assert "Exported by" not in run
    assert "Exported by" in card
    assert len(run.splitlines()) < 20
    whole = cli("info", OLD / "text", "--all")[1]
    assert run.rstrip() in whole
    assert '"hidden": 6' in whole
    assert "embedding.weight (26, 6)\n" in cli("info", OLD / "text" / "model.safetensors")[1]
    assert cli("info", OLD / "text" / "checkpoint.pt")[1] == (
        f"checkpoint.pt: a checkpoint: everything needed to go on with a run\n\n{run}"
    )


@pytest.mark.parametrize("form", ["torch", "safetensors", "onnx"])
def test_a_file_carries_its_card_and_vocabulary(form: str, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / f"words.{SUFFIXES[form]}"
    assert cli("export", OLD / "text", "--out", file, "--format", form)[0] == 0
    card = (tmp_path / "words.md").read_text()
    (tmp_path / "words.md").unlink()
    assert cli("info", file)[1] == card
    if form == "torch":
        notes = torch.load(file, weights_only=True)["notes"]
    elif form == "safetensors":
        content = file.read_bytes()
        notes = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    else:
        notes = {entry.key: entry.value for entry in onnx.load(str(file)).metadata_props}
    assert json.loads(notes["vocabulary"]) == json.loads(
        (OLD / "text" / "vocabulary.json").read_text()
    )


def test_a_file_may_be_called_as_the_one_in_a_folder(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    exit_code, said, _ = cli("export", OLD / "text", "-o", file)
    assert exit_code == 0
    assert code((tmp_path / "model.md").read_text()) in said


def test_int8(cli: Cli, tmp_path: Path) -> None:
    for kind in ("text", "speech"):
        out = tmp_path / kind
        call = ["export", OLD / kind, "-o", out, "--format", "onnx", "--quantize", "int8"]
        exit_code, said, err = cli(*call, "--data", OLD / f"{kind}-data")
        assert exit_code == 0, err
        card = cli("info", out / "model.onnx")[1]
        before, after = map(float, re.findall(r"([\d.]+) nats before, ([\d.]+) after", card)[0])
        assert f"{before:.4f} nats before" in said
        assert "## Settings" not in said
        wanted = next(
            row["loss"]
            for row in json.loads((OLD / kind / "evaluation.json").read_text())["rows"]
            if row["split"] == "valid"
            and row["statistics"] == ("recalibrated" if kind == "text" else "running")
        )
        assert before == pytest.approx(wanted, abs=1e-3)
        assert after != before
        assert after == pytest.approx(before, abs=0.1)
        kinds = {node.op_type for node in onnx.load(str(out / "model.onnx")).graph.node}
        assert "DynamicQuantizeLSTM" in kinds
    found = logits(tmp_path / "text" / "model.onnx", torch.zeros(3, 4).long(), zeros(4))
    whole = normrnn.export(OLD / "text", tmp_path / "whole", "onnx")
    expected = logits(whole, torch.zeros(3, 4).long(), zeros(4))
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)


def test_padding_does_not_reach_int8(tmp_path: Path) -> None:
    """Dynamic int8 takes its range from all that a product is given."""
    run, lengths = OLD / "speech", torch.tensor([4, 9])
    file = normrnn.export(normrnn.load(run), tmp_path / "m.onnx", "onnx", quantize="int8")
    x = torch.randn(9, 2, 6)
    found = [log_posteriors(file, fill(x, value), lengths) for value in (0.0, 1e6, float("nan"))]
    torch.testing.assert_close(found[1:], [found[0]] * 2, rtol=0, atol=0)


def fill(x: torch.Tensor, value: float) -> torch.Tensor:
    x = x.clone()
    x[4:, 0] = value
    return x


def zeros(batch: int) -> tuple[Any, ...]:
    return (torch.zeros(2, batch, 6),) * 2


def test_what_the_command_line_refuses(cli: Cli, tmp_path: Path) -> None:
    run = Path(shutil.copytree(OLD / "text", tmp_path / "run"))
    for call, sentence, exits in (
        (["-o", run, "--format", "safetensors"], "is a run directory", 2),
        (["-o", run / "model.safetensors", "--format", "safetensors"], "a file of the run", 2),
        (["-o", tmp_path / "m.onnx"], "is no name for the format torch", 2),
        (["-o", run / "config.json"], "is a file", 2),
        (["-o", tmp_path / "x", "--quantize", "int8"], "'int8' is for 'onnx'", 1),
        (["-o", tmp_path / "x", "--opset", "18"], "opset=18", 1),
        (
            ["-o", tmp_path / "y", "--format", "onnx", "--quantize", "int8", "--data", "/nowhere"],
            "/nowhere does not exist; --data says where",
            1,
        ),
    ):
        exit_code, _, err = cli("export", run, *call)
        assert (exit_code, sentence in err) == (exits, True), err
    assert not [*tmp_path.glob("y/*")]
    assert (run / "model.safetensors").read_bytes() == (
        OLD / "text" / "model.safetensors"
    ).read_bytes()


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("name", ["m.pt", "m.pt2", "m.safetensors", "m.onnx", "m.md"])
def test_nothing_in_a_file_is_run(name: str, cli: Cli, tmp_path: Path) -> None:
    canary, file = tmp_path / "canary", tmp_path / name
    contents = [pickle.dumps({"format": "normrnn export 1", "card": Evil(canary)})]
    torch.save({"format": "normrnn export 1", "card": Evil(canary)}, file)
    contents.append(file.read_bytes())
    for content in contents:
        file.write_bytes(content)
        exit_code, out, _ = cli("info", file)
        assert exit_code == (0 if name == "m.md" else 1), out
        assert not canary.exists()


def test_damaged_files_are_sentences(cli: Cli, tmp_path: Path) -> None:
    files = {form: tmp_path / f"m.{suffix}" for form, suffix in SUFFIXES.items()}
    for form in ("torch", "safetensors", "onnx"):
        normrnn.export(OLD / "speech", files[form], form)
    with zipfile.ZipFile(files["program"], "w") as archive:
        archive.writestr("p/extra/card.md", "# a card\n")
    assert cli("info", files["program"])[1] == "# a card\n"
    for file in files.values():
        content = file.read_bytes()
        for damaged in (b"", content[:7], content[: len(content) // 3], b"\xff" * 9):
            file.write_bytes(damaged)
            exit_code, _, err = cli("info", file)
            assert exit_code == 1, (file, len(damaged))
            assert str(file) in err
    assert cli("info", tmp_path)[0] == 1
    assert cli("info", tmp_path / "nothing")[0] == 1
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(UserError, match="no regular file"):
        info(tmp_path / "pipe.pt")


def test_hostile_headers_are_sentences(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    for header in (
        {"a": {"shape": [1e999]}},
        {"a": {"shape": 5}},
        {"__metadata__": ["card"]},
        ["a"],
    ):
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        assert cli("info", file)[::2] == (
            1,
            f"normrnn: {file} is damaged: no safetensors file\n",
        )
    file = tmp_path / "m.onnx"
    model = onnx.ModelProto(metadata_props=[onnx.StringStringEntryProto(key="card", value="#.")])
    file.write_bytes(model.SerializeToString().replace(b"#.", b"\xff."))
    assert cli("info", file)[0] == 1
    with zipfile.ZipFile(tmp_path / "m.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/data.pkl", b"\0" * 10**7)
    exit_code, _, err = cli("info", tmp_path / "m.pt")
    assert exit_code == 1
    assert "nothing in it was run" in err


def test_a_card_cannot_steer_the_terminal(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "m.md").write_text("# a\x1b]0;title\x07 card\n")
    assert cli("info", tmp_path / "m.md")[1] == "# a\\x1b]0;title\\x07 card\n"


def test_an_archive_that_cannot_be_unpacked_is_a_sentence(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "m.pt2"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("p/extra/card.md", "# a card\n" * 100)
    content = bytearray(file.read_bytes())
    at = content.index(b"card.md") + len("card.md")
    content[at : at + 4] = b"\xff" * 4
    file.write_bytes(content)
    assert cli("info", file) == (1, "", f"normrnn: {file} is no export of normrnn\n")


def test_the_card_of_a_run_that_was_changed(
    tiny: LanguageConfig, cli: Cli, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    run_tiny(replace(tiny, epochs=1), run)
    before = cli("info", run)[1]
    assert "| valid |" in before
    assert not caplog.text
    good = (run / "config.json").read_text()
    (run / "config.json").write_text(good.replace('"epochs": 1', '"epochs": 7'))
    assert cli("info", run)[0] == 0
    assert "was changed since checkpoint.pt was written: epochs was 1, is now 7" in caplog.text
    (run / "config.json").write_text(good.replace('"batch": 8', '"batch": 9'))
    code, out, err = cli("info", run)
    assert (code, out) == (1, "")
    assert "checkpoint.pt was written: train.batch was 8, is now 9; put it back" in err
    (run / "config.json").write_text(good)
    (run / "model.safetensors").unlink()
    assert "| valid |" not in cli("info", run)[1]
    assert "model.safetensors is missing; what it reached is left out" in caplog.text


@pytest.mark.parametrize("count", ["Infinity", "NaN", "1e999", "1" + "0" * 400, "[]"])
def test_an_evaluation_of_strange_numbers(count: str, cli: Cli, tmp_path: Path) -> None:
    shutil.copytree(OLD / "text", tmp_path / "run")
    file = tmp_path / "run" / "evaluation.json"
    file.write_text(re.sub(r'"count": \d+', f'"count": {count}', file.read_text()))
    code, out, err = cli("info", tmp_path / "run")
    assert ("| valid |" not in out) if code == 0 else ("is damaged" in err)


def test_figures_of_a_model_that_is_gone(
    tiny: LanguageConfig, cli: Cli, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run is evaluated, and then trained for longer: its card has what the new model reached."""
    run = tmp_path / "run"
    run_tiny(replace(tiny, epochs=1), run)
    assert cli("evaluate", run)[0] == 0
    assert ", read as one stream" in cli("info", run)[1]
    assert not caplog.text
    run_tiny(tiny, run)
    said = cli("info", run)[1]
    assert "is of an older model: left out; `normrnn evaluate` writes it anew" in caplog.text
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = min(r["loss"] for r in rows if r["split"] == "valid" and r["statistics"] == "running")
    assert f"| valid | – | {math.exp(best):.1f} |" in said
    caplog.clear()
    assert cli("evaluate", run)[0] == 0
    assert ", read as one stream" in cli("info", run)[1]
    assert not caplog.text


def test_nobodys_readme_is_overwritten(cli: Cli, tmp_path: Path) -> None:
    for name, out in (("README.md", "."), ("notes.md", "notes.pt")):
        (tmp_path / name).write_text("mine")
        code, _, err = cli("export", OLD / "text", "-o", tmp_path / out)
        assert code == 2
        assert f"{name} is there and is no model card: it would be overwritten" in err
        assert (tmp_path / name).read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "notes.md"}
    for _ in range(2):  # a card of ours goes
        assert cli("export", OLD / "text", "-o", tmp_path / "folder")[0] == 0


def test_int8_is_measured_on_the_runs_own_data(cli: Cli, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("w1 w2 w3\nw4 w5\n" * 40)
    call = ["export", OLD / "text", "-o", tmp_path / "out", "--format", "onnx"]
    code, _, err = cli(*call, "--quantize", "int8", "--data", other)
    assert code == 1
    assert "other.txt, split 90/5/5 by lines is not what the run was trained on; --data says" in err
