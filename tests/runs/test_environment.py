"""What a run ran on is in its directory."""

import json
from pathlib import Path

import pytest

from normrnn.ops.native.library import describe
from normrnn.runs import environment as module
from normrnn.runs.environment import record
from normrnn.runs.store import RunDirectory


def test_the_record_says_which_kernels_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They change the last bits: a run that goes on with others has two entries."""
    run = RunDirectory(tmp_path)
    record(run)
    record(run)
    (entry,) = json.loads((tmp_path / "environment.json").read_text())
    assert entry["recurrence"] == describe()
    assert entry["recurrence"]["kernels"]
    monkeypatch.setattr(module, "describe", lambda: {"kernels": "other"})
    record(run)
    entries = json.loads((tmp_path / "environment.json").read_text())
    assert [e["recurrence"]["kernels"] for e in entries][1:] == ["other"]
