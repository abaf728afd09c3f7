"""Out of the normalised world (fold) and into it (convert)."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_padded_sequence

import normrnn
from tests.helpers import CELLS, build, randomise

PLAIN_CELLS = ["tanh", "relu", "lstm", "gru"]
TORCHS = {"tanh": nn.RNN, "relu": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


def plain(cell: str, **options: Any) -> Any:
    own = {"nonlinearity": "relu"} if cell == "relu" else {}
    return TORCHS[cell](3, 2, **own, **options)


class Tagger(nn.Module):
    """A model with two layers of which one is used twice."""

    def __init__(self, lower: nn.Module, upper: nn.Module):
        super().__init__()
        self.lower, self.upper, self.again = lower, upper, lower
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.lower(x)[0])
        return self.head(self.upper(self.again(y)[0])[0])


def tagger(make: Any) -> Tagger:
    return Tagger(make(3, 2), make(2, 2))


def same(actual: Any, expected: Any, tol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tol, atol=tol)


class TestFold:
    @pytest.mark.parametrize("depth", [1, 3])
    @pytest.mark.parametrize("bidirectional", [False, True])
    @pytest.mark.parametrize("norm", ["sequence", "frame", "hidden-shared", "none"])
    @pytest.mark.parametrize("cell", PLAIN_CELLS)
    def test_same_eval_outputs(self, cell: str, norm: str, bidirectional: bool, depth: int) -> None:
        layer = build(
            cell, norm, num_layers=depth, bidirectional=bidirectional, dtype=torch.float32
        )
        folded = layer.fold()
        assert type(folded) is TORCHS[cell]
        assert folded.training
        layer.eval()
        folded.eval()
        x, state = torch.randn(6, 4, 3), torch.randn(2, depth * (1 + bidirectional), 4, 2)
        hx: Any = tuple(state) if cell == "lstm" else state[0]
        same(folded(x, hx), layer(x, hx))
        packed = pack_padded_sequence(x, torch.tensor([2, 6, 3, 1]), enforce_sorted=False)
        same(folded(packed)[0].data, layer(packed)[0].data)

    @pytest.mark.parametrize("options", [{"bias": False}, {"affine": False}])
    @pytest.mark.parametrize("cell", PLAIN_CELLS)
    def test_without_bias_or_affine(self, cell: str, options: dict[str, Any]) -> None:
        for norm in ("sequence", "hidden-shared", "none"):
            layer = build(cell, norm, dtype=torch.float32, **options).eval()
            x = torch.randn(6, 4, 3)
            same(layer.fold()(x), layer(x))

    def test_arguments_are_kept(self) -> None:
        layer = normrnn.LSTM(
            3, 4, 2, batch_first=True, dropout=0.3, bidirectional=True, dtype=torch.float64
        )
        randomise(layer)
        folded = layer.eval().fold()
        assert repr(folded) == (
            "LSTM(3, 4, num_layers=2, batch_first=True, dropout=0.3, bidirectional=True)"
        )
        assert folded.weight_ih_l0.dtype == torch.float64
        assert not folded.training
        assert build("relu", "sequence").fold().nonlinearity == "relu"

    def test_a_model_is_copied_and_a_shared_layer_stays_shared(self) -> None:
        model = tagger(normrnn.GRU)
        randomise(model)
        model.eval()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        folded = normrnn.fold(model)
        assert isinstance(folded, Tagger)
        assert type(folded.lower) is type(folded.upper) is nn.GRU
        assert folded.lower is folded.again
        assert isinstance(model.lower, normrnn.GRU)
        assert model.lower is model.again
        x = torch.randn(5, 4, 3)
        same(folded(x), model(x))
        with torch.no_grad():
            for parameter in folded.parameters():
                parameter.zero_()
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    def test_parameters_of_the_copy_are_leaves_that_train(self) -> None:
        folded = build("lstm", "sequence").fold()
        folded(torch.randn(5, 4, 3, dtype=torch.float64))[0].sum().backward()
        for parameter in folded.parameters():
            assert parameter.is_leaf
            assert parameter.requires_grad
            assert parameter.grad is not None

    @pytest.mark.parametrize(
        ("cell", "options", "reason"),
        [
            ("lstm", {"norm": "hidden", "time_steps": 4}, "inside the recurrence"),
            ("lstm", {"norm": "frame", "time_steps": 4}, "differ over 4 time steps"),
            ("lstm", {"norm": "layer"}, "every row by its own"),
            ("gru", {"norm": "hidden", "track_running_stats": False}, "no running statistics"),
            ("lstm-output", {"norm": "sequence"}, "peephole='output'"),
            ("lstm-all", {"norm": None}, "peephole='all'"),
            ("gru", {"norm": "frame", "track_running_stats": False}, "no running statistics"),
            ("gru", {"norm": "sequence", "track_running_stats": False}, "no running statistics"),
        ],
    )
    def test_what_cannot_be_folded_says_why(
        self, cell: str, options: dict[str, Any], reason: str
    ) -> None:
        make, own = CELLS[cell]
        layer = make(3, 2, **own, **options)
        with pytest.raises(ValueError, match=f"cannot be folded.*{reason}"):
            layer.fold()
        model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(3, 3), layer)})
        with pytest.raises(ValueError, match=rf"encoder\.1 cannot be folded.*{reason}"):
            normrnn.fold(model)


class TestConvert:
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("norm", ["sequence", "frame"])
    @pytest.mark.parametrize("cell", PLAIN_CELLS)
    def test_eval_keeps_the_function(self, cell: str, norm: str, bias: bool) -> None:
        model = plain(cell, num_layers=2, bidirectional=True, bias=bias).eval()
        before = copy.deepcopy(model.state_dict())
        batches = [torch.randn(5, 4, 3) * 3, torch.randn(7, 2, 3)]
        converted = normrnn.convert(model, norm, batches)  # type: ignore[arg-type]
        assert isinstance(converted, TORCHS[cell])
        assert type(converted).__module__.startswith("normrnn")
        assert converted.norm == norm
        for x in (*batches, torch.randn(6, 3, 3)):
            same(converted.eval()(x), model(x))
        assert type(model) is TORCHS[cell]
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    @pytest.mark.parametrize("cell", PLAIN_CELLS)
    def test_training_on_the_same_batch_keeps_it_too(self, cell: str) -> None:
        model = plain(cell, num_layers=2, bidirectional=True, dtype=torch.float64)
        x = torch.randn(5, 4, 3, dtype=torch.float64)
        converted = normrnn.convert(model, batches=[x])
        assert converted.training
        same(converted(x), model(x), 1e-9)

    def test_gamma_and_beta_are_the_papers(self) -> None:
        """Section 2: γ = √(σ² + ε), β = μ + b."""
        model: Any = nn.LSTM(3, 2, dtype=torch.float64)
        x = torch.randn(5, 4, 3, dtype=torch.float64)
        state = normrnn.convert(model, batches=x.split(2), eps=0.01).state_dict()
        pre = x.flatten(0, 1) @ model.weight_ih_l0.detach().t()
        mean, var = pre.mean(0), pre.var(0, correction=0)
        same(state["norm_l0.weight"], (var + 0.01).sqrt(), 1e-9)
        bias = (model.bias_ih_l0 + model.bias_hh_l0).detach()
        same(state["norm_l0.bias"], mean + bias, 1e-9)
        same(state["norm_l0.running_mean"], mean, 1e-9)
        assert state["norm_l0.num_batches_tracked"].item() == 3

    @pytest.mark.parametrize("cell", PLAIN_CELLS)
    def test_convert_then_fold_gives_back_the_original(self, cell: str) -> None:
        model = plain(cell, num_layers=2, bidirectional=True, batch_first=True).eval()
        x = torch.randn(4, 6, 3)
        back = normrnn.fold(normrnn.convert(model, batches=[x]))
        assert type(back) is TORCHS[cell]
        assert repr(back) == repr(model)
        same(back(x), model(x))
        same(back(y := torch.randn(3, 9, 3)), model(y))

    def test_models_with_shared_layers(self) -> None:
        model = tagger(nn.LSTM).eval()
        x = torch.randn(5, 4, 3)
        converted = normrnn.convert(model, batches=[x, torch.randn(6, 2, 3)])
        assert isinstance(converted, Tagger)
        assert converted.lower is converted.again
        assert isinstance(converted.lower, normrnn.LSTM)
        same(converted(x), model(x))
        same(normrnn.fold(converted)(x), model(x))
        assert type(model.lower) is nn.LSTM

    def test_layers_that_are_ours_already_keep_their_function(self) -> None:
        model = Tagger(nn.GRU(3, 2), normrnn.GRU(2, 2, norm="sequence"))
        randomise(model)
        model.eval()
        x = torch.randn(5, 4, 3)
        converted = normrnn.convert(model, batches=[x])
        assert isinstance(converted.lower, normrnn.GRU)
        same(converted(x), model(x))
        old, new = model.upper.state_dict(), converted.upper.state_dict()  # type: ignore
        assert all(torch.equal(v, new[k]) for k, v in old.items())

    def test_ours_without_a_norm_is_converted_as_torchs(self) -> None:
        model = Tagger(normrnn.GRU(3, 2, norm=None), normrnn.GRU(2, 2, norm="frame")).eval()
        x = torch.randn(5, 4, 3)
        converted = normrnn.convert(model, batches=[x])
        assert converted.lower.norm == "sequence"  # type: ignore[union-attr]
        assert converted.upper.norm == "frame"  # type: ignore[union-attr]
        same(converted(x), model(x))

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"norm": "hidden", "time_steps": 3}, "norm='sequence' or 'frame'.*norm='hidden'"),
            ({"norm": None}, "norm='sequence' or 'frame'.*norm=None"),
            ({"norm": "layer"}, "norm='sequence' or 'frame'.*norm='layer'"),
            ({"norm": "frame", "time_steps": 3}, "shared.*time_steps=3"),
            ({"affine": False}, "needs γ, β and running statistics"),
            ({"track_running_stats": False}, "needs γ, β and running statistics"),
            ({"batches": None}, "needs batches="),
            ({"batches": []}, "at least one batch"),
            ({"peephole": "output"}, "keeps the function, got peephole='output'"),
            ({"bias": False}, "keeps the function, got bias=False"),
            ({"zoneout": (0.1, 0.1)}, "keeps the function, got zoneout"),
            ({"dropout": 0.5}, "keeps the layers' own dropout"),
            ({"num_layers": 1}, "keeps the layers' own num_layers"),
            ({"batch_first": True}, "keeps the layers' own batch_first"),
        ],
    )
    def test_bad_arguments(self, options: dict[str, Any], reason: str) -> None:
        options = {"batches": [torch.randn(5, 4, 3)], **options}
        with pytest.raises(ValueError, match=reason):
            normrnn.convert(nn.LSTM(3, 2), **options)

    def test_models_that_cannot(self) -> None:
        zoned = normrnn.LSTM(3, 2, norm=None, zoneout=(0.1, 0.1))
        for model in (nn.Linear(3, 3), zoned):
            with pytest.raises(ValueError, match=r"no torch\.nn\.RNN, LSTM or GRU"):
                normrnn.convert(model, batches=[torch.randn(5, 4, 3)])


@pytest.mark.parametrize("cell", PLAIN_CELLS)
@pytest.mark.parametrize("frozen", [(), ("weight_hh_l0",), ("bias_ih_l0", "bias_hh_l0")])
def test_what_is_frozen_stays_frozen(cell: str, frozen: tuple[str, ...]) -> None:
    layer = plain(cell)
    assert isinstance(layer, nn.RNNBase)
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    ours: Any = normrnn.convert(layer, batches=[torch.randn(20, 6, 3)])
    trained = {name for name, p in ours.named_parameters() if p.requires_grad}
    biases = {"norm_l0.bias", "bias_hn_l0"} if "bias_ih_l0" in frozen else set()
    every = {name for name, _ in ours.named_parameters()}
    assert trained == every - set(frozen) - biases
    folded = {n for n, p in ours.fold().named_parameters() if not p.requires_grad}
    assert folded == set(frozen)


@pytest.mark.parametrize("cell", PLAIN_CELLS)
def test_what_is_frozen_without_a_norm(cell: str) -> None:
    layer = build(cell, "none")
    layer.weight_ih_l0.requires_grad_(False)
    frozen = [n for n, p in layer.fold().named_parameters() if not p.requires_grad]
    assert frozen == ["weight_ih_l0"]


def test_layers_made_from_torchs_are_named_not_passed_over() -> None:
    class Mine(nn.LSTM):
        pass

    def first(m: Any, x: Tensor) -> None:
        m[0](x)

    weighted = nn.utils.parametrizations.weight_norm(nn.LSTM(3, 2), "weight_hh_l0")
    for odd in (Mine(3, 2), weighted):
        model = nn.ModuleList([nn.LSTM(3, 2), odd])
        with pytest.raises(ValueError, match=f"{type(odd).__name__} is made from torch's layers"):
            normrnn.convert(model, batches=[torch.randn(5, 4, 3)], step=first)


def test_a_layer_that_no_batch_reaches_is_named() -> None:
    model = nn.ModuleDict({"used": nn.LSTM(3, 2), "idle": nn.LSTM(3, 2)})

    def one(m: Any, x: Tensor) -> None:
        m["used"](x)

    with pytest.raises(ValueError, match="finite values to reach idle, got none"):
        normrnn.convert(model, batches=[torch.randn(5, 4, 3)], step=one)


def test_regularisers_of_training_are_kept() -> None:
    x = torch.randn(6, 4, 3)
    plain = normrnn.LSTM(3, 2, norm=None, weight_drop=0.3).eval()
    ours: Any = normrnn.convert(plain, batches=[x]).eval()
    assert ours.weight_drop == 0.3
    torch.testing.assert_close(ours(x)[0], plain(x)[0], rtol=1e-4, atol=1e-5)


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


@pytest.mark.parametrize("norm", ["sequence", None])
def test_parametrized_weights_and_peepholes_fold(norm: Any) -> None:
    layer: Any = normrnn.LSTM(3, 4, norm=norm, peephole="all")
    x = torch.randn(6, 5, 3)
    randomise(layer)
    names = "weight_ih_l0", "weight_hh_l0", "weight_ci_l0", "weight_co_l0"
    for name in names:
        parametrize.register_parametrization(layer, name, Half())
    layer.parametrizations["weight_co_l0"].original.requires_grad_(False)
    folded: Any = normrnn.fold(layer.eval(), plain=False)
    same(folded(x), layer(x))
    trained = {name: getattr(folded, name).requires_grad for name in names}
    assert trained == {**dict.fromkeys(names, True), "weight_co_l0": False}


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.spectral_norm, lambda layer, _: layer])
def test_no_running_statistics_is_said(wrap: Any) -> None:
    layer = normrnn.LSTM(3, 4, track_running_stats=False, norm="sequence")
    wrap(layer, "weight_hh_l0")
    with pytest.raises(ValueError, match="no running statistics"):
        normrnn.fold(layer.eval())
    with pytest.raises(ValueError, match="no running statistics"):
        normrnn.Stream(layer)


@pytest.mark.parametrize("cell", CELLS)
def test_a_norm_in_front_of_a_layer_without_biases(cell: str) -> None:
    make, own = CELLS[cell]
    layer = make(3, 4, norm=None, bias=False, batch_first=True, **own)
    layer.weight_hh_l0.requires_grad_(False)
    norm, x = nn.BatchNorm1d(3), torch.randn(5, 6, 3)
    norm(x.transpose(1, 2) * 3 + 1)
    model = nn.Sequential(norm, layer).eval()
    lengths = torch.tensor([6, 2, 5, 1, 6])
    expected = layer(norm(x.transpose(1, 2)).transpose(1, 2), lengths=lengths)
    folded: Any = normrnn.fold(model, before=True)[1]  # type: ignore[index]
    same(folded(x, lengths=lengths), expected)
    assert not folded.weight_hh_l0.requires_grad
    assert folded.takes_lengths
