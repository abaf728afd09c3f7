"""The table of normalisations: one row each, asked by everybody, needing no torch."""

import subprocess
import sys

import pytest

from normrnn import norms


def test_rows_of_the_paper() -> None:
    assert set(norms.names()) >= {"none", "sequence", "frame", "hidden"}
    assert norms.names()[0] == "none"
    assert [n for n in norms.names() if norms.of(n).looks_ahead] == ["sequence"]
    assert not norms.of("none").keeps_statistics
    assert norms.of(None) is norms.of("none")
    assert norms.of("hidden").acts == "step"
    assert norms.of("frame").takes_time_steps
    assert not norms.of("sequence").takes_time_steps


def test_an_unknown_name_is_an_error_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"unknown normalisation 'batch'.*none, frame, sequence"):
        norms.of("batch")


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="'frame' already"):
        norms.register(norms.of("frame"))


def test_the_table_needs_no_torch() -> None:
    check = "import normrnn.norms, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
