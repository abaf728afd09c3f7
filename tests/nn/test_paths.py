"""The ways a layer can run, against each other: the recurrence, torch's kernels, torch's layer."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import normrnn
from normrnn import ops
from normrnn.ops.backend import choice
from normrnn.ops.native.library import describe
from tests.helpers import NORMS, STATISTICAL, build, close

PLAIN_CELLS = ["tanh", "relu", "lstm", "gru"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", NORMS)
def test_autocast_by_every_backend(norm: str, dtype: torch.dtype) -> None:
    """Products in half precision, statistics and results in float32."""
    layer = build("lstm", norm, bidirectional=True, dtype=torch.float32)
    x, before = torch.randn(6, 8, 3), copy.deepcopy(layer.state_dict())
    is_looped = norm in ("layer", "rms", "hidden", "hidden-shared", "recurrent", "recurrent-shared")
    for backend in ("auto", "loop") if is_looped or norm == "none" else ("auto", "loop", "torch"):
        outputs, buffers = [], []
        for enabled in (False, True):
            layer.load_state_dict(before)
            with normrnn.backend(backend), torch.autocast("cpu", dtype, enabled=enabled):  # type: ignore[arg-type]
                output = layer(x, lengths=[6] * 7 + [4])[0]
            assert output.dtype == torch.float32
            (grad,) = torch.autograd.grad(output.square().sum(), [layer.weight_hh_l0])
            assert grad.dtype == torch.float32
            outputs.append((output, grad))
            buffers.append([b.clone() for b in layer.buffers()])
        torch.testing.assert_close(outputs[1], outputs[0], rtol=0.1, atol=0.2)
        torch.testing.assert_close(buffers[1], buffers[0], rtol=0.05, atol=0.05)


class TestBackend:
    def test_a_call_that_it_cannot_run_is_an_error(self) -> None:
        layer, x = normrnn.LSTM(3, 2, norm="layer"), torch.randn(5, 4, 3)
        with normrnn.backend("torch"), pytest.raises(RuntimeError, match="torch"):
            layer(x)
        with normrnn.backend("native"), pytest.raises(RuntimeError, match="native"):
            layer.double()(x.double())
        layer(x.double())

    def test_triton_is_an_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, "normrnn.ops.triton_layer", raising=False)
        monkeypatch.delattr(ops, "triton_layer", raising=False)
        layer = normrnn.LSTM(3, 2, norm="layer")
        with normrnn.backend("triton"), pytest.raises(RuntimeError, match="pip install triton"):
            layer(torch.randn(5, 4, 3))

    def test_it_is_a_function_and_a_context_manager(self) -> None:
        layer, x = normrnn.LSTM(3, 2, norm="layer"), torch.randn(5, 4, 3)
        before = normrnn.backend("torch")
        with pytest.raises(RuntimeError):
            layer(x)
        with normrnn.backend("loop"):
            layer(x)
        with pytest.raises(RuntimeError):
            layer(x)
        before.__exit__()
        layer(x)
        with pytest.raises(ValueError, match="'cuda'"):
            normrnn.backend("cuda")  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", ["sequence", "frame"])
def test_frozen_normalisers_keep_dropout(norm: str) -> None:
    """A common habit: train on with the normalisers in eval mode. Dropout must stay."""
    layer = build("lstm", norm, num_layers=2, dropout=0.5)
    for normaliser in layer.normalisers():
        normaliser.eval()
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    torch.manual_seed(1)
    first = layer(x)[0]
    assert not torch.equal(first, layer(x)[0])
    torch.manual_seed(1)
    assert torch.equal(first, layer(x)[0])


@pytest.mark.parametrize("which", ["norm_l0", "norm_l0_reverse"])
@pytest.mark.parametrize("norm", STATISTICAL)
def test_directions_may_differ_in_mode(norm: str, which: str) -> None:
    """Each does what it would do if both had its mode."""
    layer = build("gru", norm, bidirectional=True)
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    state, wanted = copy.deepcopy(layer.state_dict()), {}
    for training in (True, False):
        layer.load_state_dict(state)
        output = layer.train(training)(x)[0].chunk(2, 2)
        wanted[training] = output, copy.deepcopy(layer.state_dict())
    layer.load_state_dict(state)
    layer.train()
    getattr(layer, which).eval()
    output = layer(x)[0].chunk(2, 2)
    for d, name in enumerate(("norm_l0", "norm_l0_reverse")):
        (expected, buffers) = wanted[name != which]
        close(output[d], expected[d], name)
        for key, value in layer.state_dict().items():
            if key.startswith(f"{name}."):
                close(value, buffers[key], key)


@pytest.mark.parametrize("norm", ["frame", "layer"])
def test_a_saved_training_graph_runs_with_every_backend(norm: Any, tmp_path: Path) -> None:
    layer, x = normrnn.LSTM(3, 4, norm=norm), torch.randn(5, 6, 3)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "layer.pt2")
    graph = torch.export.load(tmp_path / "layer.pt2").module()
    expected, _ = layer(x)
    (wanted,) = torch.autograd.grad(expected.square().sum(), [layer.weight_hh_l0])
    for name in ("auto", "loop"):
        with normrnn.backend(name):
            with torch.no_grad():
                torch.testing.assert_close(graph(x)[0], expected)
            output = graph(x)[0]
            (found,) = torch.autograd.grad(
                output.square().sum(), [graph.get_parameter("weight_hh_l0")]
            )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_backward_pass_with_another_backend() -> None:
    layer, x = normrnn.LSTM(3, 4, norm="frame"), torch.randn(5, 6, 3)
    (wanted,) = torch.autograd.grad(layer(x)[0].square().sum(), [layer.weight_hh_l0])
    output = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)[0]
    with normrnn.backend("loop"):
        (found,) = torch.autograd.grad(output.square().sum(), [layer.weight_hh_l0])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_backend_can_be_entered_twice_and_is_its_threads_own() -> None:
    block = normrnn.backend("loop")
    for _ in range(2):
        with block, ThreadPoolExecutor(1) as other:
            assert other.submit(describe).result().get("backend") is None
            assert describe()["backend"] == choice.selected == "loop"
        assert choice.selected == "auto"
    assert describe().get("backend") is None
