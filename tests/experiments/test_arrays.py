"""Arrays given in Python, in every form."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import normrnn
from normrnn.errors import UserError

RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(3, 7, 40)
LIST = [RANDOM.normal(size=(n, 2)).astype(np.float32) for n in LENGTHS]
LABELS = np.arange(40) % 2
for _x, _y in zip(LIST, LABELS, strict=True):
    _x[:, 0] += 4 * _y - 2
PADDED = np.full((40, 6, 2), np.nan, np.float32)
for _i, _x in enumerate(LIST):
    PADDED[_i, : len(_x)] = _x
SETTINGS: dict[str, Any] = {"epochs": 1, "hidden": 3, "batch": 8}


def hashes(result: Any) -> set[str]:
    return {run.config["data_sha256"] for run in result.runs}


@pytest.fixture
def reference(tmp_path: Path) -> str:
    """The hash of the same data in a file, by the command line's way."""
    file = tmp_path / "a.npz"
    np.savez(file, x=np.concatenate(LIST), lengths=LENGTHS, y=LABELS)
    result = normrnn.compare("arrays", data=file, out=tmp_path / "file", norms="none", **SETTINGS)
    (found,) = hashes(result)
    return found


@pytest.mark.parametrize(
    "given",
    [
        {"x": PADDED, "lengths": LENGTHS},
        {"x": torch.from_numpy(np.concatenate(LIST)), "lengths": torch.from_numpy(LENGTHS)},
        {"x": [torch.from_numpy(x) for x in LIST]},
    ],
    ids=["padded", "rows", "tensors"],
)
def test_every_form_is_the_same_data(given: dict[str, Any], reference: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = normrnn.compare(y=LABELS, norms="none", out=out, **given, **SETTINGS)
    assert hashes(result) == {reference}
    (file,) = out.glob("*.npz")
    with np.load(file, allow_pickle=False) as arrays:
        assert {"x_train", "lengths_valid", "y_test"} < set(arrays.files)


def test_results_live_in_a_temporary_directory() -> None:
    labels = np.array(["low", "high"], object)[LABELS]
    result = normrnn.compare(x=LIST, y=labels, groups=np.arange(40) // 4, **SETTINGS)
    assert [run.norm for run in result.runs] == ["none", "sequence"]
    assert result.runs[0].config["model"]["hidden"] == 3
    place = result.runs[0].path
    model: Any = normrnn.load(result.runs[1])
    assert model(torch.zeros(5, 2, 2)).shape == (2, 2)
    assert result.to_dict()["variants"]["sequence"]["quality"]["answer"] == "one seed"
    del result
    assert not place.exists()


def test_targets_per_step_and_given_splits(tmp_path: Path) -> None:
    steps = [x[:, :1] for x in LIST]
    parts = {
        f"{name}_{split}": values[part]
        for split, part in (("train", slice(20)), ("valid", slice(20, 30)), ("test", slice(30, 40)))
        for name, values in (("x", LIST), ("y", steps))
    }
    result = normrnn.compare(norms="sequence", out=tmp_path / "out", **parts, **SETTINGS)
    (run,) = result.runs
    assert (run.config["target"], run.config["target_per"]) == ("values", "step")
    assert run.split("test")[0]["count"] == LENGTHS[30:].sum()


@pytest.mark.parametrize("given", [{"x": LIST, "y": None}, {"x": PADDED, "y": LABELS}])
def test_unusable_arrays_leave_nothing(given: dict[str, Any], tmp_path: Path) -> None:
    """Other cases are in tests/arrays/test_read.py."""
    with pytest.raises(UserError):
        normrnn.compare(**given, out=tmp_path / "out", **SETTINGS)
    assert not (tmp_path / "out").exists()
