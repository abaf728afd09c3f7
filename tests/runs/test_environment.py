"""What a run ran on is in its directory."""

import json
from pathlib import Path

from normrnn.ops.native.library import describe
from normrnn.runs.environment import record
from normrnn.runs.machines import write_machines
from normrnn.runs.names import ENVIRONMENT
from normrnn.runs.store import RunDirectory


def test_a_run_notes_every_machine_once_and_tells_other_kernels(tmp_path: Path) -> None:
    run, file = RunDirectory(tmp_path), tmp_path / ENVIRONMENT
    assert record(run)
    assert record(run)
    (first,) = json.loads(file.read_text())
    assert first["torch"].startswith("2.")
    assert first["recurrence"] == describe()
    write_machines(tmp_path, [{**first, "cpu": "another", "recurrence": {"kernels": "sse"}}])
    assert not record(run)
    assert record(run)
    assert [e["cpu"] for e in json.loads(file.read_text())] == ["another", first["cpu"]]
    file.write_text("{")
    record(run)
    assert json.loads(file.read_text()) == [first]
