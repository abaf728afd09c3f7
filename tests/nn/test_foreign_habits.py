"""What other people's code does to layers: initialises, loads, gives odd arguments."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import normrnn
from normrnn import norms
from tests.helpers import CELLS, NORMS, build, gradients, reloaded, same

PAIRS = [(normrnn.RNN, nn.RNN), (normrnn.LSTM, nn.LSTM), (normrnn.GRU, nn.GRU)]
EVERY = {**NORMS, "layer-cell": {"norm": "layer", "cell_norm": True}}


@pytest.mark.parametrize("imports", [
    "import torch, normrnn",
    "import normrnn, importlib.util; importlib.util.find_spec('torch'); import torch",
])  # fmt: skip
def test_a_layer_is_loaded_where_normrnn_is_only_imported(imports: str, tmp_path: Path) -> None:
    file = tmp_path / "layer.pt"
    torch.save(normrnn.LSTM(3, 2, norm="sequence"), file)
    load = "print(*(torch.load(sys.argv[1], weights_only=w).norm for w in (True, False)))"
    words = [sys.executable, "-c", f"import sys; {imports}; {load}", str(file)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.split() == ["sequence", "sequence"], done.stderr


class TestForgetBias:
    @pytest.mark.parametrize("norm", EVERY)
    def test_where_it_is(self, norm: str) -> None:
        layer: Any = normrnn.LSTM(3, 2, 2, bidirectional=True, forget_bias=1.5, **EVERY[norm])
        for _ in range(2):
            for end in layer._suffixes:
                if norm == "none":
                    bias = getattr(layer, f"bias_ih_{end}") + getattr(layer, f"bias_hh_{end}")
                    assert not (bias[:2] == 1.5).any()
                else:
                    bias = getattr(layer, f"norm_{end}").bias
                    assert not bias[[0, 1, 4, 5, 6, 7]].any()
                assert bias[2:4].tolist() == [1.5, 1.5]
            layer.reset_parameters()

    def test_shown_and_refused(self) -> None:
        shown = normrnn.LSTM(3, 2, forget_bias=1.0, norm="sequence").extra_repr()
        assert "forget_bias=1.0" in shown
        for options in ({"bias": False}, {"affine": False}):
            with pytest.raises(ValueError, match=r"needs a bias.*(bias|affine)=False"):
                normrnn.LSTM(3, 2, forget_bias=1.0, norm="sequence", **options)  # type: ignore
        assert normrnn.LSTM(3, 2, norm=None, affine=False, forget_bias=1.0).forget_bias == 1.0
        for make in (normrnn.GRU, normrnn.RNN):
            with pytest.raises(TypeError, match=f"{make.__name__}.__init__.*'forget_bias'"):
                make(3, 2, forget_bias=1.0)  # type: ignore[call-arg]


class Doubled(nn.Module):
    """A parametrisation that can be assigned to."""

    def forward(self, half: Tensor) -> Tensor:
        return half * 2

    def right_inverse(self, value: Tensor) -> Tensor:
        return value / 2


def check_drawn(layer: Any, recurrent: str, input: str, size: int) -> None:
    """Each gate's recurrent matrix is orthogonal by itself; Glorot's bound is a gate's."""
    for gate in getattr(layer, recurrent).split(20):
        same(gate @ gate.t(), torch.eye(20), 1e-4)
    bound = (6 / (size + 20)) ** 0.5
    for gate in getattr(layer, input).split(20):
        assert 0.9 * bound < gate.abs().max() <= bound * (1 + 1e-5)


class TestInitialise:
    @pytest.mark.parametrize("kind", [nn.LSTM, normrnn.LSTM, nn.GRU, normrnn.GRU, nn.RNN])
    def test_gate_by_gate(self, kind: Any) -> None:
        model = nn.Sequential(kind(30, 20, 2, bidirectional=True), nn.Linear(40, 5))
        linear = model[1].weight.clone()  # type: ignore[union-attr]
        assert normrnn.initialise(model) is model
        assert torch.equal(model[1].weight, linear)  # type: ignore[arg-type]
        check_drawn(model[0], "weight_hh_l1_reverse", "weight_ih_l0", 30)

    @pytest.mark.parametrize("kind", [nn.LSTM, normrnn.LSTM, nn.GRUCell, normrnn.GRUCell])
    def test_parametrised_weights_are_drawn_too(self, kind: Any) -> None:
        own: dict[str, Any] = {"norm": "sequence"} if kind is normrnn.LSTM else {}
        layer, plain, x = kind(20, 20, **own), kind(20, 20, **own), torch.randn(6, 20)
        end = "" if isinstance(layer, nn.RNNCellBase) else "_l0"
        names = [f"{name}{end}" for name in ("weight_ih", "weight_hh")]
        for name in names:
            nn.utils.parametrizations.weight_norm(layer, name)
        assert normrnn.initialise(layer) is layer
        check_drawn(layer, names[1], names[0], 20)
        assert all(p.requires_grad for p in layer.parameters())
        normrnn.initialise(plain)
        with torch.no_grad():
            for name in names:
                plain.get_parameter(name).copy_(getattr(layer, name))
        torch.testing.assert_close(layer(x)[0], plain(x)[0])

    @pytest.mark.parametrize("norm", EVERY)
    @pytest.mark.parametrize("cell", CELLS)
    def test_every_layer(self, cell: str, norm: str) -> None:
        if "cell_norm" in EVERY[norm] and not cell.startswith("lstm"):
            return
        make, own = CELLS[cell]
        layer = make(3, 2, **own, **EVERY[norm])
        layer(torch.randn(5, 4, 3))
        normrnn.initialise(layer, bias=0.25, forget_bias=2.0)
        lstm = cell.startswith("lstm")
        for name, value in layer.named_parameters():
            if name.endswith(("norm_l0.bias", "bias_ih_l0")):
                wanted = torch.full_like(value, 0.25)
                wanted[2:4] = 2.0 if lstm else 0.25
                assert torch.equal(value, wanted if len(value) > 2 else value), name
            elif ".weight" in name or ".gamma" in name:
                gamma = norms.get(layer.norm).gamma
                assert torch.equal(value, torch.full_like(value, gamma)), name
            elif value.dim() == 1:
                assert not value.any(), name
        for name, buffer in layer.named_buffers():
            assert buffer.any() == any(part in name for part in ("_var", "_cov")), name

    def test_functions_of_ones_own(self) -> None:
        layer: Any = normrnn.LSTM(3, 4, proj_size=2, norm="sequence")
        shapes: list[tuple[int, ...]] = []

        def seen(weight: Tensor) -> None:
            shapes.append(tuple(weight.shape))
            weight.fill_(7)

        normrnn.initialise(layer, input=seen, recurrent=nn.init.zeros_)
        assert shapes == [(4, 3)] * 4 + [(2, 4)]
        assert bool((layer.weight_ih_l0 == 7).all())
        assert not layer.weight_hh_l0.any()

    def test_cells_too_and_nothing_else(self) -> None:
        cells: Any = nn.ModuleList([normrnn.LSTMCell(3, 2), nn.LSTMCell(3, 2)])
        normrnn.initialise(cells.append(normrnn.GRUCell(3, 2)), forget_bias=1.0)
        for bias in (cells[0].norm.bias, cells[1].bias_ih):
            assert bias.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
        assert not cells[1].bias_hh.any()
        with pytest.raises(ValueError, match="no recurrent layer to initialise"):
            normrnn.initialise(nn.Linear(3, 3))

    def test_parametrised_vectors(self) -> None:
        layer: Any = normrnn.LSTM(3, 2, gamma=0.5, norm="sequence")
        for name in ("weight", "bias"):
            nn.utils.parametrize.register_parametrization(layer.norm_l0, name, Doubled())
            setattr(layer.norm_l0, name, torch.randn(8))
        normrnn.initialise(layer, bias=0.25, forget_bias=1.0)
        assert layer.norm_l0.weight.tolist() == [0.5] * 8
        assert layer.norm_l0.bias.tolist() == [0.25, 0.25, 1, 1, 0.25, 0.25, 0.25, 0.25]
        nn.utils.parametrize.register_parametrization(layer, "weight_hh_l0", nn.Tanh())
        with pytest.raises(ValueError, match=r"weight_hh_l0 of LSTM cannot be.*assigned to"):
            normrnn.initialise(layer)


def states(kind: Any, dtype: torch.dtype, size: int) -> Any:
    state = torch.zeros(1, 2, size, dtype=dtype)
    return (state, state) if issubclass(kind, nn.LSTM) else state


@pytest.mark.matrix(4)
@pytest.mark.parametrize("size", [2, 64])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_a_state_of_another_type_is_refused(ours: Any, torchs: Any, norm: str, size: int) -> None:
    x = torch.randn(50, 2, 3)
    match = None if norm == "none" else r"dtype of the input, torch.float32, got.*float64"
    for given in (nn.utils.rnn.pack_padded_sequence(x, torch.tensor([50, 3])), x):
        for layer in (torchs(3, size), ours(3, size, **NORMS[norm])):
            is_named = type(layer) is ours and given is x
            with pytest.raises(RuntimeError, match=match if is_named else None):
                layer(given, states(type(layer), torch.float64, size))


BAD: dict[str, Any] = {
    "an unknown keyword": lambda make: make(3, 2, colour="red"),
    "proj_size": lambda make: make(3, 2, proj_size=5),
    "a negative projection": lambda make: make(3, 2, proj_size=-1),
    "too few": lambda make: make(3),
    "an unknown keyword of forward": lambda make: make(3, 2)(torch.zeros(5, 2, 3), colour="red"),
    "nothing": lambda make: make(3, 2)(),
    "None": lambda make: make(3, 2)(None),
    "a list": lambda make: make(3, 2)([[1.0]]),
    "integers": lambda make: make(3, 2)(torch.zeros(5, 2, 3, dtype=torch.long)),
    "float64": lambda make: make(3, 2)(torch.zeros(5, 2, 3, dtype=torch.float64)),
    "an integer type": lambda make: make(3, 2, dtype=torch.long),
    "a size in words": lambda make: make("3", 2),
    "no such device": lambda make: make(3, 2, device="nowhere"),
    "no frames": lambda make: make(3, 2)(torch.zeros(0, 4, 3)),
    **{f"sizes {bad}": lambda make, bad=bad: make(*bad)
       for bad in ((0, 4), (3, 0), (3, 4, 0), (3, 4.5), (3, -1))},
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_mistakes_raise_torchs_types(ours: Any, torchs: Any, what: str) -> None:
    with pytest.raises(Exception) as theirs:
        BAD[what](torchs)
    for norm in ("sequence", "layer", "frame", None):

        def make(*given: Any, norm: Any = norm, **options: Any) -> Any:
            return ours(*given, norm=norm, **options)

        with pytest.raises(theirs.type) as mine:
            BAD[what](make)
        if what.startswith(("sizes", "no frames")):
            assert str(mine.value) == str(theirs.value)


class Scaled(normrnn.GRU):
    """Somebody's layer with something of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, input: Any, hx: Any = None, *args: Any, **options: Any) -> Any:
        return super().forward(input * self.scale, hx, *args, **options)


class Renamed(normrnn.GRU):
    """And with nothing."""


@pytest.mark.parametrize("norm", ["sequence", None])
@pytest.mark.parametrize("kind", [Scaled, Renamed])
def test_what_subclasses_add_is_not_lost(kind: Any, norm: Any) -> None:
    x = torch.randn(5, 4, 3)
    model = nn.Sequential(kind(3, 2, norm=norm))
    model(x)
    model.eval()
    for plain in (None, True, False):
        if kind is Scaled:
            with pytest.raises(ValueError, match="Scaled overrides forward"):
                normrnn.fold(model, plain)
        else:
            torch.testing.assert_close(normrnn.fold(model, plain)(x)[0], model(x)[0])
    if norm is None:
        with pytest.raises(ValueError, match=f"{kind.__name__} .* may add something"):
            normrnn.convert(model[0], batches=[x])
    else:
        stream = normrnn.Stream(model[0])
        found = torch.stack([stream.push(frame) for frame in x[:, 0]])
        torch.testing.assert_close(found, model(x[:, 0])[0])


@pytest.mark.parametrize("norm", NORMS)
def test_a_layer_made_of_fake_tensors(norm: str) -> None:
    """As tools do that look at sizes; nothing of theirs is left for real ones to find."""
    for _ in range(2):
        with FakeTensorMode():
            layer = normrnn.LSTM(3, 2, **NORMS[norm])
            layer(torch.randn(7, 6, 3))[0].sum().backward()
        layer = normrnn.LSTM(3, 2, **NORMS[norm])
        layer(torch.randn(7, 6, 3))[0].sum().backward()
        assert torch.isfinite(gradients(layer)["weight_hh_l0"]).all()


@pytest.mark.parametrize("hidden", [8, 64])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", [normrnn.RNN, normrnn.GRU])
def test_an_output_may_be_written_to(kind: Any, norm: str, hidden: int) -> None:
    """As those of torch's GRU and RNN, not its LSTM."""
    layer, x = kind(6, hidden, **NORMS[norm]), torch.randn(20, 8, 6)
    twin = copy.deepcopy(layer)
    output, wanted = layer(x)[0], twin(x)[0]
    output += 1
    output.relu_().sum().backward()
    (wanted + 1).relu().sum().backward()
    same(gradients(layer), gradients(twin))


class Tagged(torch.Tensor):
    """As libraries that carry something along with a tensor have it."""


@pytest.mark.parametrize("norm", NORMS)
def test_types_made_from_tensors_train(norm: str) -> None:
    layer = build("lstm", norm, dtype=torch.float32)
    twin, x = copy.deepcopy(layer), torch.randn(3, 5, 3)
    output, _ = layer(x.as_subclass(Tagged))
    expected, _ = twin(x)
    output.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(output.as_subclass(Tensor), expected)
    grads = {name: grad.as_subclass(Tensor) for name, grad in gradients(layer).items()}
    torch.testing.assert_close(grads, gradients(twin))
    torch.testing.assert_close(layer.state_dict(), twin.state_dict())


@pytest.mark.parametrize("norm", NORMS)
def test_what_libraries_read_of_a_layer(norm: str) -> None:
    """A norm cannot be lost by a library that computes W_x x + W_h h from the names of the weights,
    also of copies; normalisers have vectors only, so that a rule by dimension spares them from
    weight decay; and an attribute that is missing is named."""
    layer = normrnn.LSTM(3, 2, bias=False, **NORMS[norm])
    for one in (layer, copy.deepcopy(layer), reloaded(layer, weights_only=False)):
        assert [w.shape for w in one.all_weights[0]] == [(8, 3), (8, 2)]
        assert one.norm == layer.norm
        assert hasattr(one, "_all_weights") == (norm == "none")
    layer = normrnn.LSTM(3, 2, **NORMS[norm])
    assert all(p.dim() == 1 for m in layer.normalisers() for p in m.parameters())
    del layer.training
    with pytest.raises(AttributeError, match="'training'"):
        layer(torch.randn(5, 4, 3))
