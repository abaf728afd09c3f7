"""What other people's code does to layers: initialises, loads, gives odd arguments."""

import copy
import io
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
from normrnn.nn.normaliser import GateNorm
from tests.helpers import CELLS, NORMS, build

PAIRS = [(normrnn.RNN, nn.RNN), (normrnn.LSTM, nn.LSTM), (normrnn.GRU, nn.GRU)]
EVERY = {**NORMS, "layer-cell": {"norm": "layer", "cell_norm": True}}


class TestWholeModules:
    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("cell", CELLS)
    def test_loaded_with_weights_only(self, cell: str, norm: str) -> None:
        layer = build(cell, norm, num_layers=2, bidirectional=True).eval()
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        x = torch.randn(5, 3, 3, dtype=torch.float64)
        assert type(loaded) is type(layer)
        torch.testing.assert_close(loaded(x), layer(x), rtol=0, atol=0)
        loaded.train()(x)[0].sum().backward()

    @pytest.mark.parametrize(
        "imports",
        [
            "import torch, normrnn",
            "import normrnn, importlib.util; importlib.util.find_spec('torch'); import torch",
        ],
    )
    def test_in_a_process_that_only_imports_it(self, imports: str, tmp_path: Path) -> None:
        file = tmp_path / "layer.pt"
        torch.save(normrnn.LSTM(3, 2, norm="sequence"), file)
        load = "print(*(torch.load(sys.argv[1], weights_only=w).norm for w in (True, False)))"
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; {imports}; {load}", str(file)],
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == ["sequence", "sequence"], done.stderr


class TestForgetBias:
    @pytest.mark.parametrize("norm", EVERY)
    def test_where_it_is(self, norm: str) -> None:
        layer: Any = normrnn.LSTM(3, 2, 2, bidirectional=True, forget_bias=1.5, **EVERY[norm])
        for again in (False, True):
            if again:
                layer.reset_parameters()
            for end in ("l0", "l0_reverse", "l1", "l1_reverse"):
                if norm == "none":
                    bias = getattr(layer, f"bias_ih_{end}") + getattr(layer, f"bias_hh_{end}")
                    assert not torch.equal(bias[:2], torch.full((2,), 1.5))
                else:
                    bias = getattr(layer, f"norm_{end}").bias
                    assert not bias[:2].any()
                    assert not bias[4:].any()
                assert torch.equal(bias[2:4], torch.full((2,), 1.5))

    def test_shown_and_refused(self) -> None:
        assert (
            "forget_bias=1.0" in normrnn.LSTM(3, 2, forget_bias=1.0, norm="sequence").extra_repr()
        )
        with pytest.raises(ValueError, match=r"forget_bias=1\.0 needs a bias.*bias=False"):
            normrnn.LSTM(3, 2, bias=False, forget_bias=1.0, norm="sequence")
        with pytest.raises(ValueError, match=r"needs a bias to set, got affine=False"):
            normrnn.LSTM(3, 2, affine=False, forget_bias=1.0, norm="sequence")
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


class TestInitialise:
    @pytest.mark.parametrize("kind", [nn.LSTM, normrnn.LSTM, nn.GRU, normrnn.GRU, nn.RNN])
    def test_gate_by_gate(self, kind: Any) -> None:
        """Each gate's recurrent matrix is orthogonal by itself; Glorot's bound is a gate's."""
        model = nn.Sequential(kind(30, 20, 2, bidirectional=True), nn.Linear(40, 5))
        linear = model[1].weight.clone()  # type: ignore[union-attr]
        assert normrnn.initialise(model) is model
        assert torch.equal(model[1].weight, linear)  # type: ignore[arg-type]
        layer: Any = model[0]
        for gate in layer.weight_hh_l1_reverse.split(20):
            torch.testing.assert_close(gate @ gate.t(), torch.eye(20), rtol=1e-4, atol=1e-4)
        bound = (6 / (30 + 20)) ** 0.5
        for gate in layer.weight_ih_l0.split(20):
            assert 0.9 * bound < gate.abs().max() <= bound

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

    @pytest.mark.parametrize("norm", EVERY)
    @pytest.mark.parametrize("kind", [normrnn.LSTM, normrnn.LSTMCell])
    def test_the_usual_loops_over_names_leave_gamma_alone(self, kind: Any, norm: str) -> None:
        if kind is normrnn.LSTMCell and norm not in ("layer", "none"):
            return
        layer = kind(3, 2, **EVERY[norm])
        normalisers = [m for m in layer.children() if isinstance(m, GateNorm)]
        before = [p.clone() for m in normalisers for p in m.parameters()]
        for name, parameter in layer.named_parameters():
            if "weight_hh" in name:
                nn.init.orthogonal_(parameter)
            elif "weight_ih" in name:
                nn.init.xavier_uniform_(parameter)
            elif "bias_ih" in name or "bias_hh" in name:
                nn.init.constant_(parameter, 7.0)
        after = [p for m in normalisers for p in m.parameters()]
        assert all(map(torch.equal, before, after))

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
        cells = nn.ModuleList([normrnn.LSTMCell(3, 2), nn.LSTMCell(3, 2), normrnn.GRUCell(3, 2)])
        normrnn.initialise(cells, forget_bias=1.0)
        assert cells[0].norm.bias.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]  # type: ignore
        assert cells[1].bias_ih.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]  # type: ignore
        assert not cells[1].bias_hh.any()  # type: ignore
        with pytest.raises(ValueError, match="no recurrent layer to initialise"):
            normrnn.initialise(nn.Linear(3, 3))

    @pytest.mark.parametrize("kind", [nn.LSTM, normrnn.LSTM, nn.GRUCell, normrnn.GRUCell])
    def test_parametrised_weights_are_drawn_too(self, kind: Any) -> None:
        own: dict[str, Any] = {"norm": "sequence"} if kind is normrnn.LSTM else {}
        layer = kind(20, 20, **own)
        end = "" if isinstance(layer, nn.RNNCellBase) else "_l0"
        for name in ("weight_ih", "weight_hh"):
            nn.utils.parametrizations.weight_norm(layer, f"{name}{end}")
        before = getattr(layer, f"weight_ih{end}").clone()
        assert normrnn.initialise(layer) is layer
        for gate in getattr(layer, f"weight_hh{end}").split(20):
            torch.testing.assert_close(gate @ gate.t(), torch.eye(20), rtol=1e-4, atol=1e-4)
        assert not torch.equal(getattr(layer, f"weight_ih{end}"), before)
        assert all(p.requires_grad for p in layer.parameters())
        plain, x = normrnn.initialise(kind(20, 20, **own)), torch.randn(6, 20)
        with torch.no_grad():
            for name in ("weight_ih", "weight_hh"):
                plain.get_parameter(f"{name}{end}").copy_(getattr(layer, f"{name}{end}"))
        torch.testing.assert_close(layer(x)[0], plain(x)[0])

    def test_parametrised_vectors(self) -> None:
        layer: Any = normrnn.LSTM(3, 2, gamma=0.5, norm="sequence")
        for name in ("weight", "bias"):
            nn.utils.parametrize.register_parametrization(layer.norm_l0, name, Doubled())
            setattr(layer.norm_l0, name, torch.randn(8))
        normrnn.initialise(layer, bias=0.25, forget_bias=1.0)
        assert layer.norm_l0.weight.tolist() == [0.5] * 8
        assert layer.norm_l0.bias.tolist() == [0.25, 0.25, 1, 1, 0.25, 0.25, 0.25, 0.25]

    def test_what_cannot_be_assigned_to_says_so(self) -> None:
        layer: Any = normrnn.GRU(3, 2, norm="sequence")
        nn.utils.parametrize.register_parametrization(layer, "weight_hh_l0", nn.Tanh())
        with pytest.raises(ValueError, match=r"weight_hh_l0 of GRU cannot be.*assigned to"):
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
    for given in (x, nn.utils.rnn.pack_padded_sequence(x, torch.tensor([50, 3]))):
        with pytest.raises(RuntimeError):
            torchs(3, size)(given, states(torchs, torch.float64, size))
        with pytest.raises(RuntimeError):
            ours(3, size, **NORMS[norm])(given, states(ours, torch.float64, size))
    if norm != "none":
        with pytest.raises(RuntimeError, match=r"dtype of the input, torch.float32, got.*float64"):
            ours(3, size, **NORMS[norm])(x, states(ours, torch.float64, size))


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
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_mistakes_raise_torchs_types(ours: Any, torchs: Any, what: str) -> None:
    with pytest.raises(Exception) as theirs:
        BAD[what](torchs)
    for norm in ("sequence", "layer", None):

        def make(*given: Any, norm: Any = norm, **options: Any) -> Any:
            return ours(*given, norm=norm, **options)

        with pytest.raises(theirs.type):
            BAD[what](make)


class Scaled(normrnn.GRU):
    """Somebody's layer with something of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, input: Any, hx: Any = None, *args: Any, **options: Any) -> Any:
        return super().forward(input * self.scale, hx, *args, **options)


class Renamed(normrnn.GRU):
    """And with nothing."""


class TestSubclasses:
    """What they add is never lost in silence."""

    @pytest.mark.parametrize("norm", ["sequence", None])
    @pytest.mark.parametrize("plain", [None, True, False])
    def test_folding(self, norm: Any, plain: bool | None) -> None:
        x = torch.randn(5, 4, 3)
        for kind, own in ((Scaled, True), (Renamed, False)):
            model = nn.Sequential(kind(3, 2, norm=norm))
            model(x)
            model.eval()
            if own:
                with pytest.raises(ValueError, match="Scaled overrides forward"):
                    normrnn.fold(model, plain)
            else:
                torch.testing.assert_close(normrnn.fold(model, plain)(x)[0], model(x)[0])

    def test_converting(self) -> None:
        for kind in (Scaled, Renamed):
            with pytest.raises(ValueError, match=f"{kind.__name__} .* may add something"):
                normrnn.convert(kind(3, 2, norm=None), batches=[torch.randn(5, 4, 3)])

    def test_streaming(self) -> None:
        layer, x = Scaled(3, 2, norm="sequence"), torch.randn(5, 3)
        layer(torch.randn(5, 4, 3))
        stream = normrnn.Stream(layer.eval())
        found = torch.stack([stream.push(frame) for frame in x])
        torch.testing.assert_close(found, layer(x)[0])


@pytest.mark.parametrize("norm", NORMS)
def test_a_layer_made_of_fake_tensors(norm: str) -> None:
    """As tools do that look at sizes; nothing of theirs is left for real ones to find."""
    for _ in range(2):
        with FakeTensorMode():
            layer = normrnn.LSTM(3, 2, **NORMS[norm])
            layer(torch.randn(7, 6, 3))[0].sum().backward()
        layer = normrnn.LSTM(3, 2, **NORMS[norm])
        layer(torch.randn(7, 6, 3))[0].sum().backward()
        assert layer.weight_hh_l0.grad is not None
        assert torch.isfinite(layer.weight_hh_l0.grad).all()


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
    for one, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


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
    for one, same in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad.as_subclass(Tensor), same.grad)
    torch.testing.assert_close(layer.state_dict(), twin.state_dict())


class TestOtherLibraries:
    """What libraries read of a layer."""

    @pytest.mark.parametrize("norm", NORMS)
    def test_weights_without_the_norm(self, norm: str) -> None:
        """A norm cannot be lost by a library that computes W_x x + W_h h from the names of the
        weights; copies and pickles keep that."""
        layer = normrnn.LSTM(3, 2, bias=False, **NORMS[norm])
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        for one in (layer, copy.deepcopy(layer), torch.load(file, weights_only=False)):
            assert [w.shape for w in one.all_weights[0]] == [(8, 3), (8, 2)]
            assert one.norm == layer.norm
            assert hasattr(one, "_all_weights") == (norm == "none")

    @pytest.mark.parametrize("norm", NORMS)
    def test_an_attribute_that_is_missing_is_named(self, norm: str) -> None:
        layer = normrnn.GRU(3, 2, **NORMS[norm])
        del layer.training
        with pytest.raises(AttributeError, match="'training'"):
            layer(torch.randn(5, 4, 3))

    @pytest.mark.parametrize("norm", NORMS)
    def test_normalisers_have_vectors_only(self, norm: str) -> None:
        """So that a rule by dimension spares them from weight decay."""
        layer = normrnn.LSTM(3, 2, **NORMS[norm])
        assert all(p.dim() == 1 for m in layer.normalisers() for p in m.parameters())
