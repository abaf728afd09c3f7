"""What a run ran on is in its directory."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from normrnn.ops.native.library import describe
from normrnn.runs import environment as module
from normrnn.runs.environment import built, record
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


def test_a_network_is_built_as_if_nobody_had_looked_at_its_size() -> None:
    """The look draws nothing, by torch's functions or by a tensor's."""

    class Drawn(nn.Embedding):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            self.weight.data.uniform_(2, 3)
            nn.init.uniform_(self.weight.data[0])

    torch.manual_seed(1)
    model = built(lambda: Drawn(5, 4))
    after = torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(model.weight, Drawn(5, 4).weight)
    assert torch.equal(after, torch.random.get_rng_state())
    assert model.weight[1:].min() >= 2
