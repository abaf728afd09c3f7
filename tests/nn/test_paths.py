"""The ways a layer can run, against each other: the recurrence, torch's kernels, torch's layer."""

import copy
import sys
import threading
from typing import Any

import pytest
import torch

import normrnn
from normrnn import ops
from normrnn.ops.native.library import describe
from tests.helpers import (
    CELLS,
    NORMS,
    STATISTICAL,
    build,
    check_against_reference,
    close,
    inputs,
    pull,
    run,
    states,
)

PLAIN_CELLS = ["tanh", "relu", "lstm", "gru"]


@pytest.mark.matrix(5)
@pytest.mark.parametrize("form", ["dense", "padded", "unsorted", "sorted"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cell", PLAIN_CELLS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("backend", ["loop", "torch"])
def test_sequence_wise_by_either_backend(
    backend: Any, training: bool, cell: str, depth: int, bidirectional: bool, form: str
) -> None:
    layer = build(cell, "sequence", num_layers=depth, bidirectional=bidirectional).train(training)
    lengths = {"dense": [4, 4, 4], "sorted": [5, 2, 2]}.get(form, [2, 5, 3])
    with normrnn.backend(backend):
        check_against_reference(layer, lengths, form)


@pytest.mark.parametrize("form", ["dense", "padded"])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("norm", ["frame", "hidden-shared"])
def test_shared_statistics_at_test_time_by_either_backend(norm: str, cell: str, form: str) -> None:
    backends: list[Any] = ["loop", "torch"] if cell in PLAIN_CELLS else ["loop"]
    for backend in backends:
        layer = build(cell, norm, num_layers=2, bidirectional=True).eval()
        with normrnn.backend(backend):
            check_against_reference(layer, [4, 4] if form == "dense" else [4, 1, 3], form)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_whitening_by_torchs_kernels(training: bool, bidirectional: bool) -> None:
    layer = build("gru", "whiten", bidirectional=bidirectional).train(training)
    with normrnn.backend("torch"):
        check_against_reference(layer, [5, 2, 4], "padded", tol=1e-7)


@pytest.mark.parametrize("form", ["dense", "unsorted"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", PLAIN_CELLS)
def test_the_recurrence_without_norm_is_torchs_layer(cell: str, bias: bool, form: str) -> None:
    layer = build(cell, "none", num_layers=2, bidirectional=True, bias=bias)
    lengths = [4, 4, 4] if form == "dense" else [2, 5, 3]
    x, state = inputs(max(lengths), lengths), states(layer, 3)
    found: dict[Any, list[torch.Tensor]] = {"loop": [], "torch": []}
    for backend in found:
        layer.zero_grad()
        leaves = [v.detach().clone().requires_grad_() for v in (x, *state)]
        with normrnn.backend(backend):
            outputs = run(layer, leaves[0], lengths, form, (leaves[1], leaves[2]))
        pull(outputs)
        grads = [v.grad for v in (*leaves, *layer.parameters()) if v.grad is not None]
        found[backend] = [*outputs, *grads]
    assert len(found["loop"]) == len(found["torch"]) > 10
    for k, (own, other) in enumerate(zip(found["loop"], found["torch"], strict=True)):
        close(own, other, f"tensor {k}")


@pytest.mark.skipif(describe()["kernels"] == "torch", reason="no kernels here")
@pytest.mark.parametrize("norm", ["sequence", "frame", "none"])
def test_backends_agree_in_float32(norm: str) -> None:
    layer = build("lstm", norm, num_layers=2, bidirectional=True, dtype=torch.float32).eval()
    x, outputs = torch.randn(7, 4, 3), []
    backends: list[Any] = ["auto", "native", "torch", "loop"]
    for backend in backends:
        with normrnn.backend(backend):
            outputs.append(layer(x)[0])
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-5, atol=1e-5)


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


@pytest.mark.matrix(2)
@pytest.mark.parametrize("form", ["dense", "padded"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", PLAIN_CELLS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", ["frame", "frame-slots"])
def test_frame_wise_by_torchs_kernels(
    norm: str, training: bool, cell: str, bidirectional: bool, form: str
) -> None:
    """Ready gate inputs through an identity matrix."""
    layer = build(cell, norm, num_layers=2, bidirectional=bidirectional).train(training)
    with normrnn.backend("torch"):
        check_against_reference(layer, [4, 4, 4] if form == "dense" else [5, 3, 5], form)


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

    def test_threads_choose_for_themselves(self) -> None:
        """Blocks of several threads that overlap leave nothing behind."""
        layer, x = normrnn.LSTM(3, 2, norm="frame"), torch.randn(5, 4, 3)
        both, seen = threading.Barrier(2, timeout=30), []

        def enter_and_leave(name: Any, first: bool) -> None:
            block = normrnn.backend(name)
            both.wait()
            if not first:
                both.wait()
            seen.append(describe().get("backend"))
            block.__exit__()
            if first:
                both.wait()
            seen.append(describe().get("backend"))

        arguments = ("torch", True), ("loop", False)
        threads = [threading.Thread(target=enter_and_leave, args=given) for given in arguments]
        for thread in threads:
            thread.start()
        layer(x)
        for thread in threads:
            thread.join()
        assert sorted(map(str, seen)) == ["None", "None", "loop", "torch"]
        assert "backend" not in describe()

    @pytest.mark.slow
    def test_compiled_models_take_it(self) -> None:
        layer, x = normrnn.LSTM(3, 2, norm="frame").eval(), torch.randn(5, 4, 3)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for name in ("auto", "loop", "native"):
            with normrnn.backend(name):  # type: ignore[arg-type]
                torch.testing.assert_close(compiled(x)[0], layer(x)[0], rtol=1e-5, atol=1e-6)

    def test_runs_record_it(self) -> None:
        assert "backend" not in describe()
        with normrnn.backend("loop"):
            assert describe()["backend"] == "loop"


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
    state = copy.deepcopy(layer.state_dict())
    wanted = {}
    for training in (True, False):
        layer.load_state_dict(state)
        wanted[training] = (
            layer.train(training)(x)[0].chunk(2, 2),
            copy.deepcopy(layer.state_dict()),
        )
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
