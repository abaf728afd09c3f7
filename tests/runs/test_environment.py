"""What a run ran on is in its directory."""

from pathlib import Path

from normrnn.files import read_json, sealed_json
from normrnn.ops.native.library import describe
from normrnn.runs.environment import record
from normrnn.runs.records import ENVIRONMENT
from normrnn.runs.store import RunDirectory


def test_a_run_notes_every_machine_once_and_tells_other_kernels(tmp_path: Path) -> None:
    run, file = RunDirectory(tmp_path), tmp_path / ENVIRONMENT
    assert record(run)
    assert record(run)
    ((first,), verified) = read_json(file, list)
    assert verified
    assert first["torch"].startswith("2.")
    assert first["recurrence"] == describe()
    file.write_bytes(sealed_json([{**first, "cpu": "another", "recurrence": {"kernels": "sse"}}]))
    assert not record(run)
    assert record(run)
    assert [e["cpu"] for e in read_json(file, list)[0]] == ["another", first["cpu"]]
    file.write_text("{")
    record(run)
    assert read_json(file, list) == ([first], True)
