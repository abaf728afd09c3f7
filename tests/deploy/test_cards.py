"""Exports by the command line: cards, snippets that run without this library, int8, `info`."""

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import yaml

import normrnn
from normrnn.text.config import LanguageConfig
from normrnn.text.corpus import Vocabulary
from tests.commands.conftest import Cli
from tests.deploy.exported import SUFFIXES, code, log_posteriors, logits, run_without
from tests.tiny_runs import rows_of, run_tiny, vocabulary_of

SHAPES = {"text": ("logits", [5, 2, 26]), "speech": ("log_posteriors", [50, 2, 7])}


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("torch", "text"),
        ("safetensors", "speech"),
        ("onnx", "text"),
        ("onnx", "speech"),
        pytest.param("program", "text", marks=pytest.mark.slow),
        pytest.param("program", "speech", marks=pytest.mark.slow),
    ],
)
def test_snippets_run_without_this_library(
    form: str, kind: str, cli: Cli, trained: Path, tmp_path: Path
) -> None:
    missing = ["normrnn", "torch"] if form == "onnx" else ["normrnn"]
    exit_code, said, _ = cli("export", trained / kind, "-o", tmp_path / "m", "--format", form)
    assert exit_code == 0
    card = (tmp_path / "m" / "README.md").read_text()
    assert code(card) in said
    result, shape = SHAPES[kind]
    if form in ("onnx", "program"):
        result = "outputs" if (form, kind) == ("program", "speech") else "outputs[0]"
    printed = run_without(f"{code(card)}\nprint(list({result}.shape))", tmp_path / "m", *missing)
    assert json.loads(printed) == shape


def test_the_card(cli: Cli, trained: Path, tmp_path: Path) -> None:
    cli("export", trained / "text", "-o", tmp_path / "out", "--format", "onnx")
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "normrnn"
    split, kind, value, _ = card.split("| --- |\n")[1].split("\n")[0].strip("| ").split(" | ")
    rows = json.loads((trained / "text" / "evaluation.json").read_text())["rows"]
    (loss,) = {r["loss"] for r in rows if (r["split"], r["statistics"]) == (split, kind)}
    assert float(value) == pytest.approx(math.exp(loss), abs=0.06)
    assert str(trained) not in card  # the path of the data
    for path in (tmp_path / "out", tmp_path / "out" / "model.onnx", tmp_path / "out" / "README.md"):
        assert cli("info", path)[1] == card
    run = cli("info", trained / "text")[1]
    assert f"| valid | {kind} |" in run
    assert "How to load" not in run
    assert len(run.splitlines()) < 20
    assert '"hidden": 6' in card
    assert cli("info", trained / "text" / "checkpoint.pt")[1] == run


@pytest.mark.parametrize("form", ["torch", "safetensors", "onnx"])
def test_a_file_has_its_card_beside_it_and_its_vocabulary_inside(
    form: str, cli: Cli, trained: Path, tmp_path: Path
) -> None:
    file = tmp_path / f"words.{SUFFIXES[form]}"
    assert cli("export", trained / "text", "--out", file, "--format", form)[0] == 0
    assert cli("info", file)[1] == (tmp_path / "words.md").read_text()
    if form == "torch":
        notes = torch.load(file, weights_only=True)["notes"]
    elif form == "safetensors":
        content = file.read_bytes()
        notes = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    else:
        notes = {entry.key: entry.value for entry in onnx.load(str(file)).metadata_props}
    assert Vocabulary.from_json(notes["vocabulary"]) == vocabulary_of(trained / "text")
    with (tmp_path / "words.md").open("a") as card:  # it cannot control the terminal
        card.write("a\x1b]0;title\x07 card\n")
    assert cli("info", file)[1].endswith("a\\x1b]0;title\\x07 card\n")


def test_info_of_what_has_no_card(cli: Cli, tmp_path: Path) -> None:
    for suffix in SUFFIXES.values():
        (tmp_path / f"m.{suffix}").write_bytes(b"x")
    (tmp_path / "m.md").write_text("notes")
    (tmp_path / "README.md").write_text("notes")
    for path in (*tmp_path.iterdir(), tmp_path, tmp_path / "nothing"):
        exit_code, out, err = cli("info", path)
        assert (exit_code, out) == (1, "")
        assert str(path) in err
    (tmp_path / "m.md").unlink()
    os.mkfifo(tmp_path / "m.md")
    assert cli("info", tmp_path / "m.pt")[0] == 1


def test_int8(cli: Cli, trained: Path, tmp_path: Path) -> None:
    for kind in ("text", "speech"):
        out = tmp_path / kind
        call = ["export", trained / kind, "-o", out, "--format", "onnx", "--quantize", "int8"]
        exit_code, _, err = cli(*call)
        assert exit_code == 0, err
        content = onnx.load(str(out / "model.onnx"))
        assert "DynamicQuantizeLSTM" in {node.op_type for node in content.graph.node}
        assert (kind == "text") == ("vocabulary" in {one.key for one in content.metadata_props})
    zeros: Any = (torch.zeros(2, 4, 6),) * 2
    tokens = torch.zeros(3, 4).long()
    whole = normrnn.export(trained / "text", tmp_path / "whole", "onnx")
    found, expected = (logits(f, tokens, zeros) for f in (tmp_path / "text" / "model.onnx", whole))
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
    assert not torch.equal(found[0], expected[0])


def test_padding_does_not_reach_int8(trained: Path, tmp_path: Path) -> None:
    """Dynamic int8 takes its range from the whole input of a product."""
    model = normrnn.load(trained / "speech")
    file = normrnn.export(model, tmp_path / "m.onnx", "onnx", quantize="int8")
    x, found = torch.randn(9, 2, 6), []
    for value in (0.0, 1e6, float("nan")):
        x[4:, 0] = value
        found.append(log_posteriors(file, x, torch.tensor([4, 9])))
    torch.testing.assert_close(found[1:], [found[0]] * 2, rtol=0, atol=0)


def test_exports_that_are_refused(cli: Cli, trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained / "text", tmp_path / "run"))
    for call, part, exits in (
        (["-o", run, "--format", "safetensors"], "a file of the run", 2),
        (["-o", run / "model.safetensors", "--format", "safetensors"], "a file of the run", 2),
        (["-o", tmp_path / "m.onnx", "--format", "torch"], ".pt", 2),
        (["-o", run / "config.json"], "config.json", 2),
        (["-o", tmp_path / "x", "--quantize", "int8"], "'int8'", 1),
        (["-o", tmp_path / "x", "--opset", "18"], "opset=18", 1),
    ):
        exit_code, _, err = cli("export", run, *call)
        assert (exit_code, part in err) == (exits, True), err
    before = (trained / "text" / "model.safetensors").read_bytes()
    assert (run / "model.safetensors").read_bytes() == before


def test_other_files_are_not_overwritten_by_cards(cli: Cli, trained: Path, tmp_path: Path) -> None:
    for name, out in (("README.md", "."), ("notes.md", "notes.pt")):
        (tmp_path / name).write_text("mine")
        exit_code, _, err = cli("export", trained / "text", "-o", tmp_path / out)
        assert exit_code == 2
        assert name in err
        assert (tmp_path / name).read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "notes.md"}
    for _ in range(2):  # a card of an earlier export is replaced
        assert cli("export", trained / "text", "-o", tmp_path / "folder")[0] == 0


def test_the_card_of_a_run_that_was_trained_further_or_changed(
    tiny: LanguageConfig, cli: Cli, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run_tiny(replace(tiny, epochs=1), run)
    assert "| valid |" in cli("info", run)[1]
    run_tiny(tiny, run)
    said = cli("info", run)[1]
    best = min(
        row["loss"]
        for row in rows_of(run)
        if (row["split"], row.get("statistics")) == ("valid", "running")
    )
    assert f"| valid | – | {math.exp(best):.1f} |" in said
    config = (run / "config.json").read_text()
    (run / "config.json").write_text(config.replace('"batch": 8', '"batch": 9'))
    exit_code, out, err = cli("info", run)
    assert (exit_code, out) == (1, "")
    assert "train.batch was 8, is now 9" in err
    (run / "config.json").write_text(config)
    (run / "model.safetensors").unlink()
    assert "| valid |" not in cli("info", run)[1]
