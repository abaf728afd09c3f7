"""Networks on arrays in other formats: the same outputs and losses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import normrnn
from normrnn.config.registry import recipe, with_settings
from normrnn.engine.loop import train
from tests.deploy.exported import code, run_without, session
from tests.tiny_runs import rows_of

pytest.importorskip("onnxruntime")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    lengths = random.integers(4, 9, 60)
    x = random.normal(size=(lengths.sum(), 3)).astype(np.float32)
    targets = {
        "labels": np.arange(60) % 3,
        "tags": (x[:, 0] > 0).astype(int),
        "values": 100 + 50 * x[:, :2],
    }
    for name, y in targets.items():
        np.savez(tmp_path / f"{name}.npz", x=x, lengths=lengths, y=y)
    return tmp_path


def trained(data: Path, kind: str, **settings: Any) -> Path:
    config = recipe("arrays")
    where = {"data": str(data / f"{kind}.npz"), "epochs": 1, "hidden": 4, "precision": "bf16"}
    out = data / "run"
    train(with_settings(config, {**where, **settings}), out)
    assert all(np.isfinite(row["loss"]) for row in rows_of(out))
    return out


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("labels", {"norm": "sequence", "cell": "gru", "bidirectional": True}),
        ("labels", {"norm": "layer"}),
        ("tags", {"norm": "frame"}),
        ("values", {"norm": "none"}),
    ],
)
def test_every_format(kind: str, settings: dict[str, Any], data: Path) -> None:
    run = trained(data, kind, **settings)
    model = normrnn.load(run)
    x, lengths = torch.randn(7, 3, 3), torch.tensor([7, 5, 2])
    with torch.no_grad():
        expected = model(x, lengths)
        alone = model(x[:5, 1:2], torch.tensor([5]))
    got = expected[:5, 1:2] if kind != "labels" else expected[1:2]
    torch.testing.assert_close(alone, got, rtol=1e-4, atol=1e-4)  # padding does not matter
    files = {name: normrnn.export(run, data / f"m.{name}") for name in ("pt2", "onnx")}
    program = torch.export.load(files["pt2"]).module()
    torch.testing.assert_close(program(x, lengths), expected, rtol=1e-4, atol=1e-4)
    given = {"features": x.numpy(), "lengths": lengths.numpy()}
    (found,) = session(files["onnx"]).run(["output"], given)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    if kind == "values":
        plain = torch.load(normrnn.export(run, data / "torch"), weights_only=True)
        assert "decoder.weight" in plain["weights"]
    for name, missing in (("pt2", ["normrnn"]), ("onnx", ["normrnn", "torch"])) * (kind == "tags"):
        file = normrnn.export(run, data / f"m.{name}")  # its card replaces that of the other
        text = f"{code(file.with_suffix('.md').read_text())}\nprint(list(outputs[0].shape))"
        assert run_without(text, data, *missing).strip().endswith("2]")  # classes
