"""``LiGRU`` by hand, folded, exported, and what it refuses. The other tests take it as a cell."""

from pathlib import Path
from typing import Any

import pytest
import torch

import normrnn
from tests.deploy.exported import SUFFIXES, code, session
from tests.helpers import build


def test_names_and_shapes() -> None:
    layer = normrnn.LiGRU(3, 4, 2, norm=None, bidirectional=True)
    plain = torch.nn.GRU(3, 4, 2, bidirectional=True)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    for name, value in layer.state_dict().items():
        assert value.shape[0] == 8, name
    assert isinstance(layer, torch.nn.RNNBase)


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_tensors_are_loaded_into_a_layer_without_norm(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = build("ligru", "sequence", dtype=torch.float32).eval(), torch.randn(5, 3, 3)
    file = normrnn.export(layer, tmp_path / f"model.{SUFFIXES[form]}", format=form)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"MyModel": torch.nn.Module}
    exec(code(file.with_suffix(".md").read_text()), names)
    loaded = names["model"]
    assert type(loaded) is normrnn.LiGRU
    assert loaded.norm is None
    torch.testing.assert_close(loaded(x)[0], layer(x)[0])


def test_onnx_is_a_scan_and_by_torchs_exporter_refused(tmp_path: Path) -> None:
    layer, x = build("ligru", "sequence", dtype=torch.float32).eval(), torch.randn(5, 3, 3)
    file = normrnn.export(layer, tmp_path / "file.onnx", example=(x,))
    x = torch.randn(7, 2, 3)
    found = torch.from_numpy(session(file).run(None, {"input": x.numpy()})[0])
    torch.testing.assert_close(found, layer(x)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(torch.onnx.OnnxExporterError) as error:
        torch.onnx.export(layer, (x,), tmp_path / "file", dynamo=True, verbose=False)
    assert "LiGRU" in str(error.value.__cause__)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_torch_has_no_kernel_for() -> None:
    layer, x = build("ligru", "none", dtype=torch.float32).eval(), torch.randn(5, 3, 3)
    with pytest.raises(RuntimeError, match="LiGRU"):
        torch.jit.trace(layer, (x,))
    with normrnn.backend("torch"), pytest.raises(RuntimeError, match="LIGRU"):
        build("ligru", "sequence", dtype=torch.float32).eval()(x)
