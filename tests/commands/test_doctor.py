"""`normrnn doctor`."""

import json
import tomllib
from pathlib import Path

import pytest
import torch

from normrnn.cli import main
from normrnn.commands import doctor
from normrnn.version import __version__

ROOT = Path(__file__).parents[2]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exited:
        main(["doctor", *arguments])
    assert exited.value.code == 0
    return capsys.readouterr().out


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        name: {r.split("[")[0].split(">")[0] for r in requirements}
        for name, requirements in project["optional-dependencies"].items()
        if name != "dev"
    }
    assert {name: set(packages) for name, (_, packages) in doctor.EXTRAS.items()} == declared


def test_prints_versions_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    lines = answer(capsys).splitlines()
    known = {line.split()[0]: line for line in lines if not line.startswith(" ")}
    assert __version__ in known["normrnn"]
    assert torch.__version__ in known["torch"]
    assert {"threads", "devices", "kernels", "cache", *(f"[{e}]" for e in doctor.EXTRAS)} <= {
        *known
    }


def test_json_names_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "is_installed", lambda package: package != "onnx")
    found = json.loads(answer(capsys, "--json"))
    assert found["extras"]["export"]["missing"] == ["onnx"]
    assert found["devices"][0] == "cpu"
    assert "onnx" in answer(capsys)


def test_other_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["doctor", "--verbose"])
    assert exited.value.code == 2
    assert "--verbose" in capsys.readouterr().err
