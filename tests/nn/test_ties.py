"""Weights that are one parameter in several places, before and after fold and convert."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normrnn
from tests.helpers import randomise


class Tied(nn.Module):
    """Two layers, a Linear in front of them, and whatever is tied."""

    def __init__(self, kind: Any, *names: str, **options: Any):
        super().__init__()
        self.front = nn.Linear(4, 4 * self.gates(kind), bias=False)
        self.lower, self.upper = kind(4, 4, **options), kind(4, 4, **options)
        for name in names:
            setattr(self.upper, name, getattr(self.lower, name))

    @staticmethod
    def gates(kind: Any) -> int:
        return {"LSTM": 4, "GRU": 3, "RNN": 1}[kind.__name__]

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(self.lower(self.front(x)[..., :4])[0])[0]


X = torch.randn(7, 5, 4) * 2 + 1
KINDS = [nn.RNN, nn.LSTM, nn.GRU]


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


class TestConvert:
    @pytest.mark.parametrize("kind", KINDS)
    def test_matrices_stay_one(self, kind: Any) -> None:
        model = Tied(kind, "weight_ih_l0", "weight_hh_l0").eval()
        model.front.weight = model.lower.weight_ih_l0
        model.lower.weight_hh_l0.requires_grad_(False)
        new: Any = normrnn.convert(model, batches=[X])
        assert new.lower.weight_hh_l0 is new.upper.weight_hh_l0
        assert new.lower.weight_ih_l0 is new.upper.weight_ih_l0 is new.front.weight
        assert new.front.weight is not model.front.weight
        assert not new.lower.weight_hh_l0.requires_grad
        same(new(X), model(X))
        same(new.train()(X), model(X))  # each by its own γ and β
        new(X).square().sum().backward()
        with torch.no_grad():
            new.front.weight.sub_(new.front.weight.grad)
        same(normrnn.fold(new.eval())(X), new(X))

    def test_within_a_layer_and_beside_one_that_is_ours(self) -> None:
        layer: Any = nn.LSTM(4, 4, 2, bidirectional=False)
        layer.weight_hh_l1 = layer.weight_ih_l0 = layer.weight_hh_l0
        ours = normrnn.LSTM(4, 4, norm="sequence")
        ours.weight_hh_l0 = layer.weight_hh_l0
        model = nn.ModuleList([layer, ours])
        new: Any = normrnn.convert(model, batches=[X], step=lambda m, x: m[0](x))  # type: ignore
        one = new[1].weight_hh_l0
        assert all(one is w for w in (new[0].weight_hh_l0, new[0].weight_hh_l1))
        assert one is new[0].weight_ih_l0
        same(new[0].eval()(X), layer(X))

    @pytest.mark.parametrize("kind", KINDS)
    def test_biases_of_two_layers_cannot(self, kind: Any) -> None:
        model = Tied(kind, "bias_ih_l0").eval()
        with pytest.raises(ValueError, match=r"lower\.bias_ih_l0 and upper\.bias_ih_l0 are one"):
            normrnn.convert(model, batches=[X])

    def test_a_bias_that_somebody_else_has_cannot(self) -> None:
        model = Tied(nn.LSTM)
        model.front.bias = model.lower.bias_hh_l0
        with pytest.raises(ValueError, match=r"front\.bias and lower\.bias_hh_l0 are one"):
            normrnn.convert(model.eval(), batches=[X])

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_layers_own_two_biases_are_one_beta(self, kind: Any) -> None:
        layer = kind(4, 4).eval()
        layer.bias_hh_l0 = layer.bias_ih_l0
        if kind is nn.GRU:
            with pytest.raises(ValueError, match="bias_ih_l0 and bias_hh_l0 are one parameter"):
                normrnn.convert(layer, batches=[X])
        else:
            same(normrnn.convert(layer, batches=[X])(X), layer(X))


class TestFold:
    def test_recurrent_matrices_stay_one(self) -> None:
        model = Tied(normrnn.LSTM, "weight_ih_l0", "weight_hh_l0")
        model.front.weight = model.lower.weight_ih_l0
        randomise(model)
        new: Any = normrnn.fold(model.eval())
        assert new.lower.weight_hh_l0 is new.upper.weight_hh_l0
        assert new.lower.weight_hh_l0 is not model.lower.weight_hh_l0
        assert new.lower.weight_ih_l0 is not new.upper.weight_ih_l0
        assert torch.equal(new.front.weight, model.front.weight)
        same(new(X), model(X))

    @pytest.mark.parametrize("bias", [True, False])
    def test_a_norm_in_front_is_folded_into_one_place(self, bias: bool) -> None:
        """What shares W_x with the layer behind it is left as it was."""
        norm, names = nn.BatchNorm1d(4), ["weight_ih_l0", "weight_hh_l0"]
        model = Tied(nn.LSTM, *names, *(["bias_ih_l0"] if bias else []), bias=bias)
        norm(X.flatten(0, 1) * 3)
        lower: Any = nn.Sequential(norm, model.lower).eval()
        both = nn.ModuleList([lower, model.upper]).eval()
        new: Any = normrnn.fold(both, before=True)
        same(new[0][1](X), model.lower(norm(X.flatten(0, 1)).view_as(X)))
        same(new[1](X), model.upper(X))
        assert new[0][1].weight_hh_l0 is new[1].weight_hh_l0
