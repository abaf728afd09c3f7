"""Layers of torch's become ours with the same function: ``convert``; weights that are tied."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normrnn
from tests.helpers import build, randomise, same

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
PLAIN_CELLS = ["tanh", "relu", "lstm", "gru"]
TORCHS: dict[str, Any] = {"tanh": nn.RNN, "relu": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
KINDS = [nn.RNN, nn.LSTM, nn.GRU]
X: Any = {"dtype": torch.float64}
BATCH = torch.randn(5, 4, 3)


def plain(cell: str, **options: Any) -> Any:
    own = {"nonlinearity": "relu"} if cell == "relu" else {}
    return TORCHS[cell](3, 2, **own, **options)


@pytest.mark.parametrize("options", [{"bias": True}, {"bias": False}, {"proj_size": 1}])
@pytest.mark.parametrize("norm", ["sequence", "frame"])
@pytest.mark.parametrize("cell", PLAIN_CELLS)
def test_the_same_function(cell: str, norm: Any, options: dict[str, Any]) -> None:
    """At test time, in training on the same batch, and folded back."""
    if "proj_size" in options and cell != "lstm":
        return
    own: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "batch_first": True}
    model = plain(cell, **own, dropout=0.3, **options, **X).eval()
    before = copy.deepcopy(model.state_dict())
    batches = [torch.randn(5, 4, 3, **X) * 3, torch.randn(7, 2, 3, **X)]
    converted: Any = normrnn.convert(model, norm, batches)
    assert isinstance(converted, TORCHS[cell])
    assert type(converted).__module__.startswith("normrnn")
    assert converted.norm == norm
    assert not converted.training
    back = normrnn.fold(converted)
    assert type(back) is TORCHS[cell]
    assert not back.training
    assert repr(back).replace(", bias=False", "") == repr(model).replace(", bias=False", "")
    for x in (*batches, torch.randn(6, 3, 3, **X)):
        same(converted(x), model(x), 1e-9)
        same(back(x), model(x), 1e-9)
    assert type(model) is TORCHS[cell]
    same(model.state_dict(), before)
    model.dropout = 0.0
    training = normrnn.convert(model.train(), batches=batches[:1])
    assert training.training
    same(training(batches[0]), model(batches[0]), 1e-9)


def test_gamma_and_beta_are_the_papers() -> None:
    """Section 2: γ = √(σ² + ε), β = μ + b."""
    model: Any = nn.LSTM(3, 2, **X)
    x = torch.randn(5, 4, 3, **X)
    state = normrnn.convert(model, batches=x.split(2), eps=0.01).state_dict()
    pre = x.flatten(0, 1) @ model.weight_ih_l0.detach().t()
    mean, var = pre.mean(0), pre.var(0, correction=0)
    same(state["norm_l0.weight"], (var + 0.01).sqrt(), 1e-9)
    bias = (model.bias_ih_l0 + model.bias_hh_l0).detach()
    same(state["norm_l0.bias"], mean + bias, 1e-9)
    same(state["norm_l0.running_mean"], mean, 1e-9)
    assert state["norm_l0.num_batches_tracked"].item() == 3


class Tagger(nn.Module):
    """A model with two layers of which one is used twice."""

    def __init__(self, lower: nn.Module, upper: nn.Module):
        super().__init__()
        self.lower, self.upper, self.again = lower, upper, lower
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.lower(x)[0])
        return self.head(self.upper(self.again(y)[0])[0])


def test_models_with_shared_layers() -> None:
    """There and back; the models themselves stay as they are."""
    model = Tagger(nn.LSTM(3, 2), nn.LSTM(2, 2)).eval()
    converted: Any = normrnn.convert(model, batches=[BATCH, torch.randn(6, 2, 3)])
    folded: Any = normrnn.fold(converted)
    for new, kind, old in ((converted, normrnn.LSTM, model), (folded, nn.LSTM, converted)):
        assert isinstance(new, Tagger)
        assert new.lower is new.again
        assert type(new.lower) is type(new.upper) is kind
        assert type(old.lower) is not kind
        same(new(BATCH), model(BATCH), 1e-5)
        before = copy.deepcopy(old.state_dict())
        with torch.no_grad():
            for parameter in copy.deepcopy(new).parameters():
                parameter.zero_()
        same(old.state_dict(), before)
    with torch.no_grad():
        for parameter in folded.parameters():
            parameter.zero_()
    same(converted(BATCH), model(BATCH), 1e-5)


@pytest.mark.parametrize("norm", [None, "frame"])
def test_layers_that_are_ours_already(norm: Any) -> None:
    """Without a norm they get one, with one they stay as they are."""
    model: Any = Tagger(normrnn.GRU(3, 2, norm=norm), nn.GRU(2, 2))
    randomise(model)
    converted: Any = normrnn.convert(model.eval(), batches=[BATCH])
    assert (converted.lower.norm, converted.upper.norm) == (norm or "sequence", "sequence")
    same(converted(BATCH), model(BATCH), 1e-5)
    if norm is not None:
        same(converted.lower.state_dict(), model.lower.state_dict())


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
def test_bad_arguments(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        normrnn.convert(nn.LSTM(3, 2), **{"batches": [BATCH], **options})


class Mine(nn.LSTM):
    pass


WEIGHTED = nn.utils.parametrizations.weight_norm(nn.LSTM(3, 2), "weight_hh_l0")


def tied(*names: str) -> nn.Module:
    """Two layers that share a bias, or a layer and a Linear."""
    model: Any = nn.ModuleList([nn.LSTM(3, 2), nn.LSTM(3, 2), nn.Linear(3, 8)])
    model[1 if names[1] != "bias" else 2].register_parameter(names[1], getattr(model[0], names[0]))
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(3, 3), r"no torch\.nn\.RNN, LSTM or GRU"),
        (normrnn.LSTM(3, 2, norm=None, zoneout=(0.1, 0.1)), r"no torch\.nn\.RNN, LSTM or GRU"),
        (nn.ModuleList([nn.LSTM(3, 2), Mine(3, 2)]), "Mine is made from torch's layers"),
        (nn.ModuleList([nn.LSTM(3, 2), WEIGHTED]), "ParametrizedLSTM is made from torch's layers"),
        (nn.ModuleList([nn.LSTM(3, 2), nn.LSTM(3, 2)]), "finite values to reach 1, got none"),
        (tied("bias_ih_l0", "bias_ih_l0"), r"0\.bias_ih_l0 and 1\.bias_ih_l0 are one"),
        (tied("bias_hh_l0", "bias"), r"0\.bias_hh_l0 and 2\.bias are one"),
    ],
)
def test_models_that_cannot(model: Any, reason: str) -> None:
    def first(model: Any, x: Tensor) -> None:
        (model[0] if isinstance(model, nn.ModuleList) else model)(x)

    with pytest.raises(ValueError, match=reason):
        normrnn.convert(model, batches=[BATCH], step=first)


@pytest.mark.parametrize("cell", PLAIN_CELLS)
@pytest.mark.parametrize("frozen", [(), ("weight_hh_l0",), ("bias_ih_l0", "bias_hh_l0")])
def test_what_is_frozen_stays_frozen(cell: str, frozen: tuple[str, ...]) -> None:
    layer, without = plain(cell), build(cell, "none")
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
        without.get_parameter(name).requires_grad_(False)
    ours: Any = normrnn.convert(layer, batches=[torch.randn(20, 6, 3)])
    trained = {name for name, p in ours.named_parameters() if p.requires_grad}
    biases = {"norm_l0.bias", "bias_hn_l0"} if "bias_ih_l0" in frozen else set()
    every = {name for name, _ in ours.named_parameters()}
    assert trained == every - set(frozen) - biases
    for folded in (ours.fold(), without.fold()):
        assert {n for n, p in folded.named_parameters() if not p.requires_grad} == set(frozen)


def test_regularisers_of_training_are_kept() -> None:
    layer = normrnn.LSTM(3, 2, norm=None, weight_drop=0.3).eval()
    ours: Any = normrnn.convert(layer, batches=[BATCH]).eval()
    assert ours.weight_drop == 0.3
    same(ours(BATCH)[0], layer(BATCH)[0], 1e-4)


# Weights that are one parameter in several places.


class Tied(nn.Module):
    """Two layers, a Linear in front of them, and whatever is tied."""

    def __init__(self, kind: Any, *names: str, **options: Any):
        super().__init__()
        self.lower, self.upper = kind(4, 4, **options), kind(4, 4, **options)
        self.front = nn.Linear(4, len(self.lower.weight_hh_l0), bias=False)
        for name in names:
            setattr(self.upper, name, getattr(self.lower, name))
        if "weight_ih_l0" in names:
            self.front.weight = self.lower.weight_ih_l0

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(self.lower(self.front(x)[..., :4])[0])[0]


MATRICES = "weight_ih_l0", "weight_hh_l0"
WIDE = torch.randn(7, 5, 4) * 2 + 1


class TestTies:
    @pytest.mark.parametrize("kind", KINDS)
    def test_matrices_stay_one(self, kind: Any) -> None:
        model = Tied(kind, *MATRICES).eval()
        model.lower.weight_hh_l0.requires_grad_(False)
        new: Any = normrnn.convert(model, batches=[WIDE])
        assert new.lower.weight_hh_l0 is new.upper.weight_hh_l0
        assert new.lower.weight_ih_l0 is new.upper.weight_ih_l0 is new.front.weight
        assert new.front.weight is not model.front.weight
        assert not new.lower.weight_hh_l0.requires_grad
        same(new(WIDE), model(WIDE), 1e-5)
        same(new.train()(WIDE), model(WIDE), 1e-5)  # each by its own γ and β
        new(WIDE).square().sum().backward()
        with torch.no_grad():
            new.front.weight.sub_(new.front.weight.grad)
        same(normrnn.fold(new.eval())(WIDE), new(WIDE), 1e-5)

    def test_within_a_layer_and_beside_one_that_is_ours(self) -> None:
        layer: Any = nn.LSTM(4, 4, 2, bidirectional=False)
        layer.weight_hh_l1 = layer.weight_ih_l0 = layer.weight_hh_l0
        ours = normrnn.LSTM(4, 4, norm="sequence")
        ours.weight_hh_l0 = layer.weight_hh_l0
        model: Any = nn.ModuleList([layer, ours])
        new: Any = normrnn.convert(model, batches=[WIDE], step=lambda m, x: m[0](x))  # type: ignore
        one = new[1].weight_hh_l0
        assert all(one is getattr(new[0], n) for n in ("weight_hh_l0", "weight_hh_l1"))
        assert one is new[0].weight_ih_l0
        same(new[0].eval()(WIDE), layer(WIDE), 1e-5)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_layers_own_two_biases_are_one_beta(self, kind: Any) -> None:
        layer = kind(4, 4).eval()
        layer.bias_hh_l0 = layer.bias_ih_l0
        if kind is nn.GRU:
            with pytest.raises(ValueError, match="bias_ih_l0 and bias_hh_l0 are one parameter"):
                normrnn.convert(layer, batches=[WIDE])
        else:
            same(normrnn.convert(layer, batches=[WIDE])(WIDE), layer(WIDE), 1e-5)

    def test_folding(self) -> None:
        model = Tied(normrnn.LSTM, *MATRICES, norm="sequence")
        randomise(model)
        new: Any = normrnn.fold(model.eval())
        assert new.lower.weight_hh_l0 is new.upper.weight_hh_l0
        assert new.lower.weight_hh_l0 is not model.lower.weight_hh_l0
        assert new.lower.weight_ih_l0 is not new.upper.weight_ih_l0
        assert torch.equal(new.front.weight, model.front.weight)
        same(new(WIDE), model(WIDE), 1e-5)

    @pytest.mark.parametrize("bias", [True, False])
    def test_a_norm_in_front_is_folded_into_one_place(self, bias: bool) -> None:
        """What shares W_x with the layer behind it is left as it was."""
        norm = nn.BatchNorm1d(4)
        model = Tied(nn.LSTM, *MATRICES, *(["bias_ih_l0"] if bias else []), bias=bias)
        norm(WIDE.flatten(0, 1) * 3)
        both = nn.ModuleList([nn.Sequential(norm, model.lower), model.upper]).eval()
        new: Any = normrnn.fold(both, before=True)
        same(new[0][1](WIDE), model.lower(norm(WIDE.flatten(0, 1)).view_as(WIDE)), 1e-5)
        same(new[1](WIDE), model.upper(WIDE), 1e-5)
        assert new[0][1].weight_hh_l0 is new[1].weight_hh_l0
