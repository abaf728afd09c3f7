"""`normrnn doctor`."""

import json
import tomllib
from pathlib import Path

import pytest
import torch

from normrnn import extras
from normrnn.version import __version__
from tests.commands.conftest import Cli

ROOT = Path(__file__).parents[2]


def test_prints_versions_kernels_and_extras(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, _ = cli("doctor")
    assert code == 0
    known = {line.split()[0]: line for line in said.splitlines() if not line.startswith(" ")}
    assert __version__ in known["normrnn"]
    assert torch.__version__ in known["torch"]
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*extras.extras(), "dev"} == declared["optional-dependencies"].keys()
    assert known.keys() >= {"threads", "devices", "kernels", *(f"[{e}]" for e in extras.extras())}

    def some(name: str) -> list[str]:
        return [] if name == "onnx" else [name]

    monkeypatch.setattr(extras.metadata, "distributions", some)
    found = json.loads(cli("doctor", "--json")[1])
    assert found["extras"]["export"]["missing"] == ["onnx"]
    assert found["extras"]["docs"]["missing"] == []
    assert found["devices"][0] == "cpu"
    said = cli("doctor")[1]
    assert "missing onnx" in said
    assert "pip install onnx onnxruntime onnxscript\n" in said
