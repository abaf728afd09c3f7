"""Our layers in the place of torch's, by torch's own name, by ``replace`` and ``replacing``."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import GRU, LSTM, RNN  # as libraries bind them

import normrnn
from tests.helpers import NORMS

KINDS = {"RNN": (RNN, normrnn.RNN), "LSTM": (LSTM, normrnn.LSTM), "GRU": (GRU, normrnn.GRU)}


@pytest.fixture
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's names hold our layers, as programs do it by hand."""
    for name, (_, ours) in KINDS.items():
        monkeypatch.setattr(torch.nn, name, ours)


@pytest.mark.usefixtures("by_name")
@pytest.mark.parametrize("name", KINDS)
def test_other_tools_while_torchs_names_are_replaced(name: str) -> None:
    own: dict[str, Any] = {"nonlinearity": "relu"} if name == "RNN" else {}
    x, (theirs, _) = torch.randn(20, 6, 3), KINDS[name]
    layer = getattr(nn, name)(3, 4, 2, norm="frame", bidirectional=True, **own)
    layer(x)
    plain = layer.eval().fold()
    assert type(plain) is theirs
    torch.testing.assert_close(plain(x)[0], layer(x)[0])
    for one in (theirs(3, 4, **own), getattr(nn, name)(3, 4, norm=None, **own)):
        new = normrnn.convert(one, batches=[x]).eval()
        torch.testing.assert_close(new(x)[0], one(x)[0], rtol=1e-4, atol=1e-5)
    initialised: Any = normrnn.initialise(theirs(3, 2), bias=0.5, forget_bias=1.0)
    wanted = [0.5, 0.5, 1, 1, 0.5, 0.5, 0.5, 0.5] if name == "LSTM" else [0.5]
    assert initialised.bias_ih_l0.tolist() == wanted * (len(initialised.bias_ih_l0) // len(wanted))


class Tagger(nn.Module):
    """As in a library: a recurrent layer, one used twice, and weights that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = LSTM(3, 4, 2, dropout=0.1, bidirectional=True)
        self.second = self.first
        self.left, self.right = GRU(8, 4, batch_first=True), GRU(8, 4, batch_first=True)
        self.right.weight_hh_l0 = self.left.weight_hh_l0
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)[0]
        return self.head(torch.cat([self.left(x)[0], self.right(x)[0]], -1))


class TestReplace:
    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("name", KINDS)
    def test_keeps_weights_under_every_norm(self, name: str, norm: str) -> None:
        theirs, ours = KINDS[name]
        plain = theirs(3, 4, 2, bidirectional=True, batch_first=True).eval()
        plain.weight_hh_l1.requires_grad_(False)
        new: Any = normrnn.replace(plain, **NORMS[norm])
        assert type(new) is ours
        assert new.batch_first
        assert not new.training
        shared = dict(plain.named_parameters())
        for key, value in new.named_parameters(recurse=False):
            if key.startswith("weight"):
                assert torch.equal(value, shared[key])
                assert value.requires_grad == (key != "weight_hh_l1")
        if new.norm is None:
            x = torch.randn(5, 6, 3)
            torch.testing.assert_close(new(x)[0], plain(x)[0])
        else:
            both = plain.bias_ih_l0 + plain.bias_hh_l0
            kept = 8 if name == "GRU" else None  # the rest of a GRU's is inside r ⊙ (…)
            torch.testing.assert_close(new.norm_l0.bias[:kept], both[:kept])

    def test_a_model(self) -> None:
        model: Any = Tagger()
        new: Any = normrnn.replace(model, "sequence", momentum=0.3)
        assert type(model.first) is LSTM
        assert new.first is new.second
        assert type(new.first) is normrnn.LSTM
        assert new.get_submodule("first.norm_l1_reverse").momentum == 0.3
        assert new.left.weight_hh_l0 is new.right.weight_hh_l0
        assert torch.equal(new.left.weight_hh_l0, model.left.weight_hh_l0)
        assert new.left.weight_hh_l0 is not model.left.weight_hh_l0
        new(torch.randn(5, 6, 3)).sum().backward()

    def test_forget_bias_and_no_bias(self) -> None:
        layer: Any = LSTM(3, 2)
        new: Any = normrnn.replace(layer, "layer", forget_bias=1.0)
        assert new.norm_l0.bias[2:4].tolist() == [1, 1]
        torch.testing.assert_close(new.norm_l0.bias[:2], (layer.bias_ih_l0 + layer.bias_hh_l0)[:2])
        without: Any = normrnn.replace(GRU(3, 2, bias=False), "frame")
        assert without.norm_l0.bias is None


class Own(LSTM):
    """A user's subclass."""


def tied_biases() -> nn.Module:
    model = nn.ModuleList([LSTM(3, 2), LSTM(3, 2)])
    model[1].bias_ih_l0 = model[0].bias_ih_l0  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize(
    ("model", "norm", "options", "match"),
    [
        (nn.Linear(3, 3), "layer", {}, "no torch"),
        (nn.Sequential(Own(3, 2)), "layer", {}, "Own"),
        (LSTM(3, 2), "layer", {"hidden_size": 3}, "hidden_size"),
        (LSTM(3, 2), "batch", {}, "'batch'"),
        (tied_biases(), "layer", {}, r"0\.bias_ih_l0 and 1\.bias_ih_l0"),
    ],
)
def test_refused(model: nn.Module, norm: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        normrnn.replace(model, norm, **options)


class TestReplacing:
    def test_inside_and_not_outside(self) -> None:
        with normrnn.replacing("layer", cell_norm=None, eps=1e-3) as made:
            model: Any = Tagger()
            relu: Any = RNN(3, 4, 1, "relu")
        layers: list[Any] = made  # type: ignore[assignment]
        assert layers == [model.first, model.left, model.right, relu]
        assert [type(layer).__module__ for layer in layers] == ["normrnn.nn.layers"] * 4
        assert relu.nonlinearity == "relu"
        assert {(layer.norm, layer.norm_l0.eps) for layer in layers} == {("layer", 1e-3)}
        assert type(Tagger().first) is LSTM
        model(torch.randn(5, 6, 3)).sum().backward()

    def test_what_stays_torchs(self) -> None:
        outside = LSTM(3, 4)
        normalised = normrnn.LSTM(3, 4, norm="sequence")
        normalised(torch.randn(5, 6, 3))
        with normrnn.replacing("layer"):
            assert type(Own(3, 4)) is Own
            assert type(normrnn.LSTM(3, 4, norm="frame")) is normrnn.LSTM
            assert type(normalised.eval().fold()) is LSTM
            assert isinstance(LSTM(3, 4), nn.LSTM)
            with ThreadPoolExecutor(1) as other:
                assert type(other.submit(LSTM, 3, 4).result()) is LSTM
            assert type(outside) is LSTM

    def test_nested_and_after_an_error(self) -> None:
        with normrnn.replacing("layer"):
            with normrnn.replacing(None):
                assert GRU(3, 4).norm is None  # type: ignore[attr-defined]
            assert GRU(3, 4).norm == "layer"  # type: ignore[attr-defined]
        assert type(GRU(3, 4)) is GRU
        with pytest.raises(ValueError, match="'batch'"), normrnn.replacing("batch"):  # type: ignore
            GRU(3, 4)
        assert type(GRU(3, 4)) is GRU

    def test_a_warning_if_nothing_was_built(self) -> None:
        with pytest.warns(UserWarning, match="LSTM"), normrnn.replacing("layer"):
            nn.Linear(3, 3)
