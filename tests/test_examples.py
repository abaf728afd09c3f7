"""The programs of ``examples/``, started as a user would, on tiny data."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
TINY = {
    "classifier": ["--epochs", "1", "--sequences", "40"],
    "language_model": ["--updates", "3", "--text", "text.txt", "--out", "saved.pt"],
    "tagger": ["--updates", "3"],
    "policy": ["--updates", "3"],
    "compiled": ["--updates", "2"],
}
PRINTS = {
    "classifier": r"epoch 1: accuracy on held-out sequences  nn\.LSTM \d\.\d\d   normrnn\.LSTM \d",
    "language_model": r"running statistics .*, recalibrated .*, folded .*; saved in saved\.pt",
    "tagger": r"update 3: accuracy .*\nfolded: GRU\(1, 32, .*norm=None\), the same tags: True",
    "policy": r"update 3: reward with resets 0\.\d\d, without 0\.\d\d",
    "compiled": r"largest difference of the first losses.*: (\S+)\nupdate 2: loss",
}


def run_example(name: str, folder: Path) -> str:
    (folder / "text.txt").write_text("the cat sat on the mat. " * 600)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / f"{name}.py"), *TINY[name]],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_are_here() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(TINY) == set(PRINTS)


@pytest.mark.parametrize("name", [name for name in TINY if name != "compiled"])
def test_prints_what_its_docstring_shows(name: str, tmp_path: Path) -> None:
    assert re.search(PRINTS[name], run_example(name, tmp_path))
    if name == "language_model":  # the saved weights need no normrnn
        state = torch.load(tmp_path / "saved.pt", weights_only=True)
        model = nn.ModuleDict(
            {
                "embedding": nn.Embedding(*state["embedding.weight"].shape),
                "lstm": nn.LSTM(64, 128),
                "head": nn.Linear(128, len(state["head.bias"])),
            }
        )
        model.load_state_dict(state)


@pytest.mark.slow
def test_compiled(tmp_path: Path) -> None:
    found = re.search(PRINTS["compiled"], run_example("compiled", tmp_path))
    assert found is not None
    assert float(found.group(1)) < 1e-4


@pytest.mark.parametrize("name", TINY)
def test_shows_what_it_prints_and_is_short(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    doc = text.split('"""')[1]
    assert f"python examples/{name}.py" in doc
    first = PRINTS[name].split("\\n")[0]
    shape = re.sub(r"update \d+|epoch \d+|saved\\\.pt", ".*", first)
    assert re.search(shape, doc), shape
    assert len(text.splitlines()) <= 85
