"""Every format gives the eval output of the network it was made from, at any T and B."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import normrnn
from normrnn.errors import UserError
from normrnn.speech.task import AcousticModel
from normrnn.text.task import LanguageModel
from tests.deploy.exported import SUFFIXES, code, log_posteriors, logits, onnx_run, session
from tests.helpers import randomise

SIZES = [(4, 2), (9, 5), (1, 1)]
CLOSE: Any = {"rtol": 1e-4, "atol": 1e-4}
DIM = torch.export.Dim("T")
X = torch.zeros(4, 2, 3)
PACKED = nn.utils.rnn.pack_padded_sequence(X, [4, 3])


def text_model(cell: Any = "lstm", norm: str = "frame", layers: int = 2, **more: Any) -> Any:
    model = LanguageModel(
        7, 4, layers, cell=cell, embedding=3, norm=None if norm == "none" else norm, **more
    )
    randomise(model)
    return model.eval()


def speech_model(norm: str = "sequence", layers: int = 2, **more: Any) -> Any:
    options = {"norm": None if norm == "none" else norm, "layers": layers, **more}
    model = AcousticModel(3, 5, hidden=4, **options)
    randomise(model.rnn)
    with torch.no_grad():
        model.mean.uniform_(-3, 3)
        model.variance.uniform_(0.1, 4)
    return model.eval()


@torch.no_grad()
def check_text(model: Any, file: Path) -> None:
    for T, B in SIZES:
        tokens = torch.randint(0, 7, (T, B))
        parts = 2 if model.rnn.mode == "LSTM" else 1
        state = tuple(torch.randn(model.rnn.num_layers, B, 4) for _ in range(parts))
        wanted, after = model(tokens, state)
        found = logits(file, tokens, state)
        torch.testing.assert_close(found, [wanted, *after], **CLOSE)


@torch.no_grad()
def check_speech(model: Any, file: Path) -> None:
    for lengths in ([5, 5], [3, 7, 1, 6], [1]):
        utterances = [torch.randn(n, 3) * 2 + 1 for n in lengths]
        padded = nn.utils.rnn.pad_sequence(utterances, padding_value=float("nan"))
        found = log_posteriors(file, padded, torch.tensor(lengths))
        assert found.shape == (max(lengths), len(lengths), 5)
        for b, wanted in enumerate(map(model.log_posteriors, utterances)):
            torch.testing.assert_close(found[: lengths[b], b], wanted, **CLOSE)
            if file.suffix in (".onnx", ".pt2"):
                assert not found[lengths[b] :, b].any()


CASES: list[Any] = [
    ("lstm", "frame", {}),
    ("gru", "hidden", {"layers": 1}),
    ("rnn", "sequence", {}),
    ("lstm", "none", {"layers": 1}),
    ("lstm", "frame", {"peephole": "all"}),
]
FORMATS = ["onnx", "torch", "safetensors", pytest.param("program", marks=pytest.mark.slow)]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("cell", "norm", "options"), CASES)
def test_language_models(form: str, cell: str, norm: str, options: Any, tmp_path: Path) -> None:
    """In ONNX with its own operators."""
    model, file = text_model(cell, norm, **options), tmp_path / f"m.{SUFFIXES[form]}"
    if "peephole" in options and form in ("torch", "safetensors"):
        with pytest.raises(ValueError, match="no peepholes"):
            normrnn.export(model, file, form)
        return
    check_text(model, normrnn.export(model, file, form))
    if form == "onnx":
        check_graph(file, cell.upper(), "Scan", ["h0", "c0"] if cell == "lstm" else ["h0"])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("norm", "options"),
    [("whiten", {"layers": 1}), ("hidden", {"bidirectional": False}), ("sequence", {"layers": 3})],
)
def test_acoustic_models(form: str, norm: str, options: Any, tmp_path: Path) -> None:
    model = speech_model(norm, **options)
    check_speech(model, normrnn.export(model, tmp_path / f"m.{SUFFIXES[form]}", form))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's, of its own files
@torch.no_grad()
def test_a_program_without_a_state(tmp_path: Path) -> None:
    """By tools that refuse tensors that share memory."""
    layer, x, axes = normrnn.LSTM(3, 4, norm="sequence").eval(), torch.randn(7, 2, 3), {0: DIM}
    randomise(layer)
    file = tmp_path / "layer.pt2"
    normrnn.export(layer, file, "program", example=torch.randn(5, 2, 3), dynamic=(axes,))
    program = torch.export.load(file)
    compiled: Any = torch.compile(program.module(), backend="aot_eager")
    for run in (program.run_decompositions().module(), compiled):
        torch.testing.assert_close(run(x), layer(x), **CLOSE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize("norm", ["sequence", "layer"])
@torch.no_grad()
def test_a_program_compiled_ahead_of_time(norm: Any, tmp_path: Path) -> None:
    layer, x = normrnn.LSTM(3, 4, norm=norm).eval(), torch.randn(7, 3, 3)
    randomise(layer)
    how: Any = {"example": torch.randn(5, 2, 3), "dynamic": ({0: DIM, 1: torch.export.Dim("B")},)}
    file = normrnn.export(layer, tmp_path / "layer.pt2", "program", **how)
    inductor: Any = torch._inductor
    package = inductor.aoti_compile_and_package(
        torch.export.load(file), package_path=str(tmp_path / "package.pt2")
    )
    found = inductor.aoti_load_package(package)(x)
    torch.testing.assert_close(tree_leaves(found), tree_leaves(layer(x)), **CLOSE)


def check_graph(file: Path, operator: str, absent: str, states: list[str]) -> None:
    model = onnx.load(str(file))
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    kinds = {node.op_type for node in model.graph.node}
    assert operator in kinds
    assert absent not in kinds
    inputs, outputs = session(file).get_inputs(), session(file).get_outputs()
    assert [one.name for one in inputs] == ["tokens", *states]
    assert inputs[0].shape == ["T", "B"]
    assert [one.name for one in outputs] == ["logits", *(n.replace("0", "n") for n in states)]


SCANNED: list[Any] = [
    ("gru", {"norm": "layer"}),
    pytest.param("lstm", {"norm": "layer", "layers": 2}, marks=pytest.mark.slow),
    pytest.param("lstm", {"norm": "recurrent", "time_steps": 4}, marks=pytest.mark.slow),
    pytest.param("rnn", {"norm": "frame", "time_steps": 4}, marks=pytest.mark.slow),
    pytest.param("lstm", {"norm": "sequence", "zoneout": (0.2, 0.1)}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("cell", "options"), SCANNED)
def test_networks_without_an_operator_of_their_own_in_onnx(
    cell: Any, options: Any, tmp_path: Path
) -> None:
    """Their recurrence is a Scan of standard operators; an export of fixed sizes fixes no other."""
    model = text_model(cell, **{"layers": 1, **options})
    normrnn.export(model, tmp_path / "fixed.pt2", dynamic={})
    check_text(model, normrnn.export(model, tmp_path / "text.pt2", "program"))
    file = normrnn.export(model, tmp_path / "text.onnx", "onnx")
    check_text(model, file)
    check_graph(file, "Scan", cell.upper(), ["h0", "c0"] if cell == "lstm" else ["h0"])


def test_the_version_of_operators(tmp_path: Path) -> None:
    model = text_model()
    for opset, written in ((None, 18), (22, 22)):
        file = normrnn.export(model, tmp_path / "m.onnx", "onnx", opset=opset)
        assert [one.version for one in onnx.load(str(file)).opset_import] == [written]
        check_text(model, file)
    for form, wrong in (("onnx", 9), ("onnx", 9999), ("torch", 18)):
        with pytest.raises(ValueError, match=f"opset={wrong}"):
            normrnn.export(model, tmp_path / "wrong", form, opset=wrong)


@pytest.mark.parametrize(
    ("make", "reason", "forms"),
    [
        (lambda: text_model(norm="layer"), "norm='layer'", ("torch", "safetensors")),
        (lambda: text_model(norm="recurrent"), "normalises the cell too", ("torch",)),
        (lambda: text_model(time_steps=5), "differ over 5 time steps.*shared=True", ("torch",)),
        (lambda: Own(track_running_stats=False), "track_running_stats", SUFFIXES),
        (lambda: nn.Linear(2, 2), "Linear holds no layer", ("torch", "safetensors")),
    ],
)
def test_what_cannot_fold_is_refused(make: Any, reason: str, forms: Any, tmp_path: Path) -> None:
    model = make()
    example = (X, None, torch.tensor([4, 3])) if isinstance(model, Own) else None
    for form in forms:
        with pytest.raises(ValueError, match=reason):
            normrnn.export(model, tmp_path / "out", form, example=example)
    assert not [*tmp_path.iterdir()]


class Own(nn.Module):
    """A user's own, with all that its layer takes."""

    def __init__(self, kind: Any = normrnn.LSTM, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(3, 4, 2, **options)

    def forward(
        self, x: Tensor, state: Any = None, lengths: Any = None, twice: bool = False
    ) -> Any:
        output, state = self.rnn(x, state, lengths=lengths)
        return 2 * output if twice else output, state


def padded(B: int, T: int, batch_first: bool = False) -> tuple[Tensor, Tensor]:
    """NaN in the padding."""
    lengths = torch.randint(1, T + 1, (B,))
    lengths[-1] = T
    x = torch.randn(B, T, 3)
    x[torch.arange(T) >= lengths[:, None]] = float("nan")
    return (x if batch_first else x.transpose(0, 1).contiguous()), lengths


PADDED: list[Any] = [
    (normrnn.LSTM, {"peephole": "output", "bidirectional": True, "batch_first": True}),
    (normrnn.GRU, {"bidirectional": True, "batch_first": True, "norm": "hidden"}),
    (normrnn.RNN, {"nonlinearity": "relu", "norm": None}),
]
PADDED_SCANS: list[Any] = [
    pytest.param(kind, options, marks=pytest.mark.slow)
    for kind, options in [
        (normrnn.GRU, {"norm": "layer", "bidirectional": True, "batch_first": True}),
        (normrnn.LSTM, {"norm": "recurrent", "time_steps": 3}),
        (normrnn.LSTM, {"norm": "sequence", "proj_size": 2, "bidirectional": True}),
    ]
]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(("kind", "options"), [*PADDED, *PADDED_SCANS])
@torch.no_grad()
def test_a_users_own_padded_batches_in_onnx(kind: Any, options: Any, tmp_path: Path) -> None:
    first = options.get("batch_first", False)
    axes = {0: "B", 1: "T"} if first else {0: "T", 1: "B"}
    model, (x, lengths) = Own(kind, **options), padded(3, 5, first)
    randomise(model)
    model.eval()(x, None, lengths)
    how: Any = {"example": (x, None, lengths), "dynamic": {"x": axes, "lengths": {0: "B"}}}
    file = normrnn.export(model, tmp_path / "m.onnx", "onnx", **how)
    for B, T in [(2, 5), (4, 9), (1, 1)]:
        x, lengths = padded(B, T, first)
        expected = tree_leaves(model(x, None, lengths))
        torch.testing.assert_close(onnx_run(file, x=x, lengths=lengths), expected, **CLOSE)


def carried(B: int, T: int) -> tuple[Tensor, Any, Tensor]:
    """Two states that differ, or one could be taken for the other."""
    x, lengths = padded(B, T)
    return x.nan_to_num(), (torch.randn(2, B, 4), torch.randn(2, B, 4)), lengths


@pytest.mark.parametrize(
    ("pick", "names"),
    [
        (lambda x, state, _: (x, state), ["x", "state.0", "state.1"]),
        (lambda x, _, lengths: (x, None, lengths), ["x", "lengths"]),
        (lambda x, state, lengths: (x, state, lengths), ["x", "state.0", "state.1", "lengths"]),
        (lambda x, state, _: (x, list(state), None, True), ["x", "state.0", "state.1"]),
        (lambda x, *_: x, ["x"]),
    ],
)
@torch.no_grad()
def test_every_tensor_of_the_arguments_in_onnx(pick: Any, names: list[str], tmp_path: Path) -> None:
    model: Any = Own().eval()
    randomise(model)
    file = normrnn.export(model, tmp_path / "m.onnx", "onnx", example=pick(*carried(3, 5)))
    weights = onnx.load(str(file)).graph.initializer
    assert len([w for w in weights if len(w.dims) == 3]) == 4  # W and R of each layer, once
    inputs = {one.name: one.shape for one in session(file).get_inputs()}
    assert list(inputs) == names
    if "state.0" in names:
        assert [inputs["state.0"][k] for k in (0, 2)] == [2, 4]
    for B, T in [(2, 8), (5, 1)]:
        given = pick(*carried(B, T))
        given = given if isinstance(given, tuple) else (given,)
        tensors = [value for value in tree_leaves(given) if isinstance(value, Tensor)]
        found = onnx_run(file, **dict(zip(names, tensors, strict=True)))
        output, state = model(*given)
        torch.testing.assert_close(found, [output, *state], **CLOSE)


@pytest.mark.parametrize(
    ("form", "options", "reason"),
    [
        ("onnx", {"example": (X, None, [4, 3])}, "lengths= has to be a tensor"),
        ("onnx", {"example": (X, None, None, torch.zeros(4, 2).bool())}, "no resets="),
        ("onnx", {"example": (PACKED,)}, "no PackedSequence"),
        ("onnx", {"example": (X[0],)}, "takes batches"),
        ("onnx", {"example": [X]}, "takes batches"),
        ("onnx", {"example": (X.numpy(),)}, "ndarray"),
        ("onnx", {"example": (X,), "dynamic": {"y": {0: "T"}}}, "'y', and the tensors"),
        ("pickle", {}, "unknown format='pickle': choose one of torch"),
        ("torch", {"quantize": "int8"}, "'int8' is for 'onnx'"),
    ],
)
def test_wrong_arguments(form: str, options: Any, reason: str, tmp_path: Path) -> None:
    model = normrnn.LSTM(3, 4, peephole="all", norm=None)
    with pytest.raises(ValueError, match=reason):
        normrnn.export(model, tmp_path / "m.onnx", form, **options)
    assert not [*tmp_path.iterdir()]


class Tagger(nn.Module):
    """A user's own, with one layer under two names."""

    def __init__(self, kind: Any = normrnn.GRU) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.inner = nn.ModuleDict({"rnn": kind(3, 3, 2, batch_first=True)})
        self.again = self.inner["rnn"]
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner["rnn"](self.norm(x.transpose(1, 2)).transpose(1, 2))[0]
        return self.out(self.again(x)[0])


def tagger() -> Any:
    model = Tagger()
    randomise(model)
    return model.eval()


def rebuilt(file: Path, make: Any) -> Any:
    """The model that the code of a card makes."""
    names: dict[str, Any] = {"MyModel": make}
    text = code((file.parent / "README.md").read_text())
    exec(text.replace(f'"{file.name}"', repr(str(file))), names)
    return names["model"]


@pytest.mark.parametrize("form", ["torch", "safetensors"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of its compiler
def test_a_users_own_model_from_tensors(compiled: bool, form: str, tmp_path: Path) -> None:
    """By the code on its card, which finds the names of the model that was compiled."""
    model = tagger()
    given: Any = torch.compile(model) if compiled else model
    found = rebuilt(normrnn.export(given, tmp_path / "own", form), lambda: Tagger(nn.GRU).eval())
    assert type(found.again) is nn.GRU
    x = torch.randn(6, 5, 3)
    torch.testing.assert_close(found(x), model(x), **CLOSE)


def test_a_users_own_model_traced(tmp_path: Path) -> None:
    model = tagger()
    x = torch.randn(2, 5, 3)
    for form in ("onnx", "program"):
        with pytest.raises(ValueError, match="example="):
            normrnn.export(model, tmp_path / form, form)
    file = normrnn.export(model, tmp_path / "own", "onnx", example=(x,))
    for B, T in SIZES:
        x = torch.randn(B, T, 3)
        torch.testing.assert_close(onnx_run(file, x=x), [model(x)], **CLOSE)


def test_a_model_is_unchanged(tmp_path: Path) -> None:
    model = text_model().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for form, suffix in SUFFIXES.items():
        normrnn.export(model, tmp_path / f"m.{suffix}", form)
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in model.decoder.parameters())


FULL = """
import resource, sys, torch, normrnn
model = normrnn.LSTM(20, 64, norm=None).eval()
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
for format, suffix in zip(sys.argv[2::2], sys.argv[3::2]):
    try:
        file = f"{sys.argv[1]}/{format}.{suffix}"
        normrnn.export(model, file, format=format, example=(torch.zeros(3, 2, 20),))
    except normrnn.errors.UserError as error:
        print(format, "File too large; the old file is kept" in str(error))
"""


@pytest.mark.slow
def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """In a process: torch's writer of archives ends it when a write fails as it closes."""
    for format, suffix in SUFFIXES.items():
        (tmp_path / f"{format}.{suffix}").write_text("before")
    words = [word for pair in SUFFIXES.items() for word in pair]
    command = [sys.executable, "-W", "ignore", "-c", FULL, str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [word for format in SUFFIXES for word in (format, "True")]
    assert {path.read_text() for path in tmp_path.iterdir()} == {"before"}


def test_nothing_is_left_where_onnx_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match="needs onnx"):
        normrnn.export(tagger(), tmp_path / "out", "onnx", example=torch.randn(6, 5, 3))
    assert not (tmp_path / "out").exists()
