"""The notebooks run from start to end, and show what they are said to show."""

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
FAST, SLOW = ("moving",), ("arrays", "paper")
PICTURES = {"arrays": 1, "paper": 1, "moving": 0}
"""Pictures shown inline."""


def outputs(notebook: Any) -> list[Any]:
    return [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]


def check(name: str, notebook: Any) -> None:
    found = outputs(notebook)
    assert not [out for out in found if out.output_type == "error"]
    assert sum("image/png" in out.get("data", {}) for out in found) == PICTURES[name]
    assert max(len(c.outputs) for c in notebook.cells if c.cell_type == "code") <= 3


def test_all_are_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {*FAST, *SLOW}


@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_committed_outputs(name: str) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    check(name, notebook)
    assert all(c.outputs or c.source for c in notebook.cells if c.cell_type == "code")
    assert str(Path.home()) not in str(outputs(notebook))


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(FOLDER.parents[1] / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}})
    check(name, client.execute())
