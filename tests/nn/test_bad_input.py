"""Mistakes: each says what was wrong, the value seen, and what would be right."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import normrnn
from tests.helpers import NORMS, build

LAYERS = [normrnn.RNN, normrnn.LSTM, normrnn.GRU]
PAIRS = {"tanh": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


NORM_CHOICES = "'sequence', 'frame', 'hidden', 'layer', .*None"
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"norm": n}, rf"unknown norm={n!r}.*{NORM_CHOICES}")
        for n in ("batch", "None", "", 1, True)
    ),
    ({"norm": "sequence", "time_steps": 7}, "time_steps=7.*norm='sequence'.*'frame' or 'hidden'"),
    *(
        ({"norm": "frame", "time_steps": k}, rf"time_steps must be a positive integer.*{k}")
        for k in (0, -3, 2.5, "ten", True)
    ),
    (
        {"norm": "hidden", "time_steps": 3, "sync": True},
        "sync=True.*'hidden'.*'sequence' or 'frame'",
    ),
    *(
        ({"norm": n, "cell_norm": True}, rf"cell_norm=True.*LSTM.*'layer'.*norm='{n}'")
        for n in ("sequence", "frame", "hidden")
    ),
    *(({"eps": e}, f"eps must be positive, got {e}") for e in (0.0, -1e-5, float("nan"))),
    *(
        ({"momentum": m}, f"momentum must be None or between 0 and 1, got {m}")
        for m in (-0.1, 1.1, float("nan"))
    ),
]


@pytest.mark.parametrize(("options", "match"), REFUSED, ids=str)
def test_arguments_are_refused(options: dict[str, Any], match: str) -> None:
    """By an error that names the value and the choices, never a fallback."""
    for make in LAYERS:
        with pytest.raises(ValueError, match=match):
            make(3, 2, **options)


def test_arguments_of_other_layers_are_refused() -> None:
    for make in LAYERS:
        with pytest.raises(TypeError, match="normalise"):
            make(3, 2, normalise="sequence")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="bias"):  # as in torch: a shifted position shows here
            make(3, 2, bias="yes")  # type: ignore[arg-type]
    for make in (normrnn.RNN, normrnn.GRU):
        with pytest.raises(TypeError, match="peephole"):
            make(3, 2, peephole="all")  # type: ignore[call-arg]
        with pytest.raises(ValueError, match=r"cell_norm=True is for an LSTM.*got (GRU|RNN)"):
            make(3, 2, norm="layer", cell_norm=True)
    with pytest.raises(ValueError, match=r"unknown peephole='input': choose .*'output' or 'all'"):
        normrnn.LSTM(3, 2, peephole="input", norm="sequence")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'gelu'.*'tanh' or 'relu'"):
        normrnn.RNN(3, 2, nonlinearity="gelu", norm="sequence")
    with pytest.raises(ValueError, match=r"proj_size.*peephole|peephole.*proj_size"):
        normrnn.LSTM(3, 4, proj_size=2, norm=None, peephole="all")


@pytest.mark.parametrize("make", LAYERS)
def test_layer_norm_of_one_feature_warns(make: Any) -> None:
    """Only the sign of the input is left of it."""
    with pytest.warns(UserWarning, match="magnitude"):
        layer = make(1, 4, norm="layer", dtype=torch.float64).eval()
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    torch.testing.assert_close(layer(one)[0], layer(100 * one)[0], rtol=1e-3, atol=1e-3)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("cell", PAIRS)
class TestForwardLikeTorch:
    """Where torch.nn raises, ours raises the same type, and says the same numbers."""

    def compare(self, cell: str, norm: str, training: bool, *given: Any, match: str) -> None:
        plain = PAIRS[cell](3, 2, num_layers=2, dtype=torch.float64)
        packed = isinstance(given[0], PackedSequence)  # for which torch leaves it to the kernel
        with pytest.raises(Exception, match=None if packed else match) as theirs:
            plain(*given)
        layer = build(cell, norm, num_layers=2).train(training)
        before = {k: v.clone() for k, v in layer.state_dict().items()}
        with pytest.raises(theirs.type, match=match):
            layer(*given)
        assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())

    def state(self, cell: str, *shape: int) -> Any:
        return (x(*shape), x(*shape)) if cell == "lstm" else x(*shape)

    def test_feature_size(self, cell: str, norm: str, training: bool) -> None:
        wrong = r"Expected 3, got 4"
        self.compare(cell, norm, training, x(5, 2, 4), match=wrong)
        self.compare(cell, norm, training, x(5, 4), match=wrong)
        packed = pack_padded_sequence(x(5, 2, 4), torch.tensor([5, 2]))
        self.compare(cell, norm, training, packed, match=wrong)

    @pytest.mark.parametrize("shape", [(2, 3, 2), (1, 2, 2), (2, 2, 3)])
    def test_state_of_the_wrong_shape(
        self, cell: str, norm: str, training: bool, shape: tuple[int, ...]
    ) -> None:
        wrong = r"Expected hidden.*size \(2, 2, 2\), got \[" + ", ".join(map(str, shape))
        state = self.state(cell, *shape)
        self.compare(cell, norm, training, x(5, 2, 3), state, match=wrong)
        packed = pack_padded_sequence(x(5, 2, 3), torch.tensor([5, 2]))
        self.compare(cell, norm, training, packed, state, match=wrong)

    def test_state_of_the_wrong_dimension(self, cell: str, norm: str, training: bool) -> None:
        wrong = "should also be [23]-D"
        self.compare(cell, norm, training, x(5, 2, 3), self.state(cell, 2, 2), match=wrong)
        self.compare(cell, norm, training, x(5, 3), self.state(cell, 2, 1, 2), match=wrong)

    def test_input_of_the_wrong_dimension(self, cell: str, norm: str, training: bool) -> None:
        for shape, seen in (((5,), "1D"), ((5, 2, 3, 1), "4D")):
            self.compare(cell, norm, training, x(*shape), match=f"2D or 3D, got {seen}")

    def test_wrong_cell_state(self, cell: str, norm: str, training: bool) -> None:
        if cell == "lstm":
            state = x(2, 2, 2), x(2, 3, 2)
            wrong = r"Expected hidden\[1\] size \(2, 2, 2\), got \[2, 3, 2\]"
            self.compare(cell, norm, training, x(5, 2, 3), state, match=wrong)


@pytest.mark.parametrize("norm", ["sequence", "frame", "hidden"])
@pytest.mark.parametrize("state", [torch.zeros(1, 2, 2), (torch.zeros(1, 2, 2),), (1, 2)])
def test_lstm_without_a_pair_of_states(norm: str, state: Any) -> None:
    with pytest.raises(
        (ValueError, RuntimeError), match=r"pair \(h_0, c_0\)|should also be 3-D|initial state"
    ):
        build("lstm", norm, dtype=torch.float32)(torch.randn(5, 2, 3), state)


@pytest.mark.parametrize("norm", ["sequence", "layer", "none"])
@pytest.mark.parametrize("cell", ["gru", "tanh"])
def test_a_pair_of_states_where_there_is_one(cell: str, norm: str) -> None:
    state = x(1, 2, 2), x(1, 2, 2)
    with pytest.raises(ValueError, match=r"hx of (GRU|RNN) must be one tensor, h_0, got a tuple"):
        build(cell, norm)(x(5, 2, 3), state)


@pytest.mark.parametrize("norm", ["sequence", "layer", "none"])
def test_no_lengths_for_no_sequences(norm: str) -> None:
    """An empty list is a list of integers."""
    layer = build("gru", norm).eval()
    for lengths in ([], torch.tensor([], dtype=torch.int64)):
        assert layer(x(5, 0, 3), lengths=lengths)[0].shape == (5, 0, 2)


WRONG_LENGTHS: list[tuple[Any, str]] = [
    ([5, -1, 2], r"not be negative, got lengths \[5, -1, 2\]"),
    (torch.tensor([5, -1, 2]), r"not be negative, got lengths \[5, -1, 2\]"),
    ([5, 6, 2], r"not exceed T=5, got lengths \[5, 6, 2\]"),
    ([5, 2], r"one number per sequence: expected 3, got shape \(2,\)"),
    ([], r"one number per sequence: expected 3, got shape \(0,\)"),
    (torch.tensor(5), r"expected 3, got shape \(\)"),
    ([[5, 2, 1]], r"expected 3, got shape \(1, 3\)"),
    ([5.0, 2.0, 1.0], "must be integers, got torch.float32"),
    ([True, True, True], "must be integers, got torch.bool"),
]


@pytest.mark.parametrize("norm", ["sequence", "layer", "none"])
@pytest.mark.parametrize("batch_first", [False, True])
class TestLengths:
    """Five frames, three sequences."""

    @pytest.mark.parametrize(("lengths", "match"), WRONG_LENGTHS, ids=str)
    def test_refused(self, norm: str, batch_first: bool, lengths: Any, match: str) -> None:
        layer = build("gru", norm, batch_first=batch_first)
        before = {k: v.clone() for k, v in layer.state_dict().items()}
        with pytest.raises(ValueError, match=match):
            layer(x(3, 5, 3) if batch_first else x(5, 3, 3), lengths=lengths)
        assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())

    def test_with_other_input(self, norm: str, batch_first: bool) -> None:
        layer = build("gru", norm, batch_first=batch_first)
        packed = pack_padded_sequence(x(5, 2, 3), torch.tensor([5, 2]))
        with pytest.raises(ValueError, match=r"lengths= goes with a padded.*PackedSequence"):
            layer(packed, lengths=[5, 2])
        with pytest.raises(ValueError, match=r"3 dimensions, got 2.*unbatched"):
            layer(x(5, 3), lengths=[5])
        with pytest.raises(RuntimeError, match="Expected 3, got 4"):
            layer(x(5, 5, 4), lengths=[5, 2, 5, 5, 1])

    def test_integers_of_any_kind_are_fine(self, norm: str, batch_first: bool) -> None:
        layer = build("gru", norm, batch_first=batch_first).eval()
        batch = x(3, 5, 3) if batch_first else x(5, 3, 3)
        wanted = layer(batch, lengths=[5, 2, 3])[0]
        kinds = [torch.tensor([5, 2, 3], dtype=d) for d in (torch.int64, torch.int32, torch.uint8)]
        for lengths in (*kinds, (5, 2, 3)):
            assert torch.equal(layer(batch, lengths=lengths)[0], wanted)


@pytest.mark.parametrize("norm", list(NORMS))
def test_full_lengths_are_the_dense_batch(norm: str) -> None:
    layer = build("gru", norm, num_layers=2, bidirectional=True).eval()
    given = x(5, 3, 3)
    torch.testing.assert_close(layer(given, lengths=[5, 5, 5]), layer(given), rtol=0, atol=0)


@pytest.mark.parametrize("norm", ["frame", None])
@pytest.mark.parametrize("make", LAYERS)
class TestHints:
    def test_lengths_in_the_place_of_hx(self, make: Any, norm: Any) -> None:
        layer = make(3, 2, norm=norm, dtype=torch.float64)
        for lengths in ([5, 4], (5, 4), torch.tensor([5, 4])):
            with pytest.raises((ValueError, RuntimeError), match="lengths="):
                layer(x(5, 2, 3), lengths)

    def test_forgotten_batch_first(self, make: Any, norm: Any) -> None:
        layer = make(3, 2, norm=norm, dtype=torch.float64)
        with pytest.raises(ValueError, match="batch_first=True"):
            layer(x(2, 5, 3), lengths=[5, 4])
        state = x(1, 2, 2)
        with pytest.raises(RuntimeError, match="batch_first=True"):
            layer(x(2, 5, 3), (state, state) if make is normrnn.LSTM else state)
