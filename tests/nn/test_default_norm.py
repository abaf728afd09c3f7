"""The default norm, and what the signatures of the layers show."""

import copy
import inspect
import pickle
import warnings
from typing import Any, assert_type, get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import normrnn
from normrnn import norms
from normrnn.nn.options import NormName

LAYERS = [normrnn.RNN, normrnn.LSTM, normrnn.GRU]


def forward_quietly(layer: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.randn(4, 3, 2))


class TestNotGiven:
    @pytest.mark.parametrize("make", LAYERS)
    def test_training_warns_once(self, make: Any) -> None:
        """Not where the norm is given, nor with both directions."""
        forward_quietly(make(2, 3, norm="sequence"))
        forward_quietly(make(2, 3, bidirectional=True))
        forward_quietly(normrnn.replace(nn.LSTM(2, 3), "sequence"))
        layer = make(2, 3)
        forward_quietly(layer.eval())
        with pytest.warns(UserWarning, match="norm='sequence'"):
            layer.train()(torch.randn(4, 3, 2))
        forward_quietly(layer)
        forward_quietly(make(2, 3))

    def test_copies_and_pickles_warn_too(self) -> None:
        keys = normrnn.GRU(2, 3, norm="sequence").state_dict().keys()
        for layer in (copy.deepcopy(made := normrnn.GRU(2, 3)), pickle.loads(pickle.dumps(made))):
            normrnn.GRU.__mro__[1].looks_ahead_warned = False  # type: ignore[attr-defined]
            with pytest.warns(UserWarning, match="norm='sequence'"):
                layer(torch.randn(4, 3, 2))
            assert type(layer.norm) is str
            assert "norm='sequence'" in repr(layer)
            assert layer.state_dict().keys() == keys


class TestSignatures:
    OWN = "norm eps momentum affine track_running_stats gamma cell_norm time_steps sync"
    OWN += " process_group shrinkage weight_drop dropout_kind zoneout learn_initial_state"

    @pytest.mark.parametrize("make", LAYERS)
    def test_all_arguments_are_shown(self, make: Any) -> None:
        parameters = inspect.signature(make).parameters
        kinds = {p.kind for p in parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds
        shown = [n for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
        lstm = ["peephole", "forget_bias"] if make is normrnn.LSTM else []
        assert shown == lstm + self.OWN.split()
        assert repr(parameters["norm"].default) == "'sequence'"
        assert get_type_hints(make.__init__)["norm"] == NormName

    def test_the_type_has_every_norm(self) -> None:
        names = [name for part in get_args(NormName) for name in get_args(part)]
        assert sorted(names) == sorted(norms.names())
        assert type(None) in get_args(NormName)

    @pytest.mark.parametrize("make", [*LAYERS, normrnn.LSTMCell])
    def test_none_is_a_name_too(self, make: Any) -> None:
        assert repr(make(2, 3, norm="none")) == repr(make(2, 3, norm=None))

    def test_types(self) -> None:
        x, packed = torch.randn(4, 3, 2), pack_sequence([torch.randn(4, 2)] * 2)
        lstm, gru = normrnn.LSTM(2, 3, norm="frame"), normrnn.GRU(2, 3, norm="frame")
        assert_type(lstm(x), tuple[Tensor, tuple[Tensor, Tensor]])
        assert_type(lstm(packed), tuple[PackedSequence, tuple[Tensor, Tensor]])
        assert_type(gru.forward(x), tuple[Tensor, Tensor])
        assert_type(gru(packed, lengths=None), tuple[PackedSequence, Tensor])
        assert_type(gru.fold(), nn.GRU)


def test_what_recurrent_starts_with() -> None:
    """γ 0.1 and a normalised cell are its own; both can be said."""
    layer: Any = normrnn.LSTM(3, 2, norm="recurrent")
    n = layer.norm_l0
    assert all((gamma == 0.1).all() for gamma in (n.weight, n.gamma_hh, n.weight_c))
    assert not torch.cat([n.bias, n.bias_c]).any()
    layer = normrnn.LSTM(3, 2, norm="recurrent", gamma=0.7, cell_norm=False)
    assert layer.norm_l0.weight_c is None
    assert (layer.norm_l0.gamma_hh == 0.7).all()
    assert "norm_l0.running_mean_c" not in layer.state_dict()
    assert normrnn.GRU(3, 2, norm="recurrent").norm_l0.cell_norm is False  # type: ignore
