"""fold → ONNX → onnxruntime: the real LSTM operator, with dynamic T and B; exports of a LiGRU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import normrnn
from tests.deploy.exported import SUFFIXES, code, onnx_run, session
from tests.helpers import NORMS, build


class Batched(nn.Module):
    """ONNX wants plain inputs and outputs: a state given, a state returned."""

    def __init__(self, layer: Any):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        if self.layer.mode == "LSTM":
            output, (h, c) = self.layer(x, (h, c))
            return output, h, c
        output, h = self.layer(x, h)
        return output, h, c + 0


def compare(file: Path, inputs: dict[str, Tensor], wanted: Sequence[Tensor]) -> None:
    """What onnxruntime computes of these inputs, and what torch does."""
    torch.testing.assert_close(onnx_run(file, **inputs), [*wanted], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # torch's own checks of shapes
@pytest.mark.filterwarnings("ignore:Exporting a model to ONNX with a batch_size other than 1")
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", ["tanh", "lstm", "gru"])
def test_export(cell: str, bidirectional: bool, tmp_path: Path) -> None:
    layer = build(cell, "sequence", num_layers=2, bidirectional=bidirectional, dtype=torch.float32)
    model = normrnn.fold(Batched(layer).eval())
    D = 2 if bidirectional else 1

    def example(T: int, B: int) -> tuple[Tensor, ...]:
        return torch.randn(T, B, 3), torch.randn(2 * D, B, 2), torch.randn(2 * D, B, 2)

    file = tmp_path / "model.onnx"
    torch.onnx.export(
        model,
        example(4, 2),
        str(file),
        dynamo=False,
        input_names=["x", "h", "c"],
        output_names=["output", "h_n", "c_n"],
        dynamic_axes={"x": {0: "T", 1: "B"}, "h": {1: "B"}, "c": {1: "B"}, "output": {0: "T"}},
    )
    operators = [node.op_type for node in onnx.load(str(file)).graph.node]
    assert operators.count({"tanh": "RNN", "lstm": "LSTM", "gru": "GRU"}[cell]) == 2
    assert "Loop" not in operators
    for T, B in ((4, 2), (9, 5), (1, 1)):
        x, h, c = example(T, B)
        compare(file, {"x": x, "h": h, "c": c}, Batched(layer).eval()(x, h, c))


class Ragged(nn.Module):
    """A user's own, that gives its layer padded batches with lengths."""

    def __init__(self, layer: Any):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.layer(x, lengths=lengths)


def export(model: nn.Module, args: tuple[Tensor, ...], file: Path) -> None:
    """By torch's default exporter, for any T and B."""
    axes: Any = tuple({0: "T", 1: "B"} if arg.dim() == 3 else {0: "B"} for arg in args)
    torch.onnx.export(model, args, str(file), dynamic_shapes=axes, verbose=False)


FORMS = [("lstm", "none", True)]
MORE_FORMS = [
    ("gru", "layer", False),
    *[("lstm-all", norm, True) for norm in NORMS if norm not in ("none", "whiten")],
    *[(cell, "recurrent", False) for cell in ("tanh", "relu", "gru")],
    ("lstm", "hidden-shared", False),
]


@pytest.mark.filterwarnings("ignore")  # of torch's exporter
@pytest.mark.parametrize(
    ("cell", "norm", "ragged"),
    [*FORMS, *(pytest.param(*form, marks=pytest.mark.slow) for form in MORE_FORMS)],
)
@torch.no_grad()
def test_the_default_exporter(cell: str, norm: str, ragged: bool, tmp_path: Path) -> None:
    """Of torch, dense and with ``lengths=``; padding may hold NaN, and lengths may be 0."""
    layer = build(cell, norm, dtype=torch.float32, bidirectional=ragged)
    model = (Ragged(layer) if ragged else layer).eval()

    def example(T: int, B: int) -> tuple[Tensor, ...]:
        x, lengths = torch.randn(T, B, 3), torch.arange(T, T - B, -1).clamp(0).flip(0)
        if not ragged:
            return (x,)
        return x.masked_fill((torch.arange(T)[:, None] >= lengths)[:, :, None], torch.nan), lengths

    file = tmp_path / "model.onnx"
    export(model, example(5, 4), file)
    names = [one.name for one in session(file).get_inputs()]
    for T, B in ((3, 7), (1, 1)):
        args = example(T, B)
        compare(file, dict(zip(names, args, strict=True)), tree_leaves(model(*args)))


@pytest.mark.filterwarnings("ignore")  # of torch's exporter
def test_the_default_exporter_names_fold(tmp_path: Path) -> None:
    """Where it cannot express a layer."""
    x = torch.randn(5, 4, 3)
    for layer in (normrnn.LSTM(3, 4, norm="whiten").eval(), normrnn.GRU(3, 4, norm="frame")):
        with pytest.raises(torch.onnx.OnnxExporterError, match=r"normrnn\.fold\("):
            export(layer, (x,), tmp_path / "model.onnx")


class Decoder(nn.Module):
    """One step of a layer-normalised cell, as decoders are written."""

    def __init__(self, kind: str):
        super().__init__()
        self.cell = getattr(normrnn, kind)(3, 4)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        state = self.cell(x, (h, h) if isinstance(self.cell, nn.LSTMCell) else h)
        return state[0] if isinstance(state, tuple) else state


@pytest.mark.parametrize("kind", ["RNNCell", "LSTMCell", "GRUCell"])
def test_cells_by_our_own_export(kind: str, tmp_path: Path) -> None:
    """For other batches than the example, in onnxruntime."""
    model, file = Decoder(kind).eval(), tmp_path / "cell.onnx"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    model.requires_grad_(False)
    normrnn.export(model, file, format="onnx", example=(torch.randn(2, 3), torch.randn(2, 4)))
    for batch in (2, 5, 1):
        x, h = torch.randn(batch, 3), torch.randn(batch, 4)
        compare(file, {"x": x, "h": h}, [model(x, h)])


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)


class First(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG002
        return x + 1


def test_models_of_other_modules(tmp_path: Path) -> None:
    """Arrays of numpy are not constants; an argument that a model ignores stays an argument."""
    with pytest.raises(RuntimeError, match="numpy"):
        normrnn.export(Doubled(), tmp_path / "m.onnx", example=(torch.randn(2, 3),))
    file, example = tmp_path / "first.onnx", (torch.randn(2, 3), torch.ones(2, 3))
    normrnn.export(First(), file, format="onnx", example=example)
    assert [given.name for given in session(file).get_inputs()] == ["x", "y"]


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_tensors_of_a_ligru_are_loaded_into_a_layer_without_norm(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = build("ligru", "sequence", dtype=torch.float32).eval(), torch.randn(5, 3, 3)
    file = normrnn.export(layer, tmp_path / f"model.{SUFFIXES[form]}", format=form)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"MyModel": nn.Module}
    exec(code(file.with_suffix(".md").read_text()), names)
    loaded = names["model"]
    assert type(loaded) is normrnn.LiGRU
    assert loaded.norm is None
    torch.testing.assert_close(loaded(x)[0], layer(x)[0])


def test_a_ligru_is_a_scan_and_by_torchs_exporter_refused(tmp_path: Path) -> None:
    layer, x = build("ligru", "sequence", dtype=torch.float32).eval(), torch.randn(5, 3, 3)
    file = normrnn.export(layer, tmp_path / "file.onnx", example=(x,))
    compare(file, {"input": (x := torch.randn(7, 2, 3))}, layer(x))
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
