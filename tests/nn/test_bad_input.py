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


@pytest.mark.parametrize("make", LAYERS)
class TestConstruction:
    @pytest.mark.parametrize("norm", ["batch", "Sequence", "None", "", 1, True])
    def test_unknown_norm(self, make: Any, norm: Any) -> None:
        """An error that lists the choices, never a fallback."""
        with pytest.raises(
            ValueError,
            match=rf"unknown norm={norm!r}.*'sequence', 'frame', 'hidden', 'layer', .*None",
        ):
            make(3, 2, norm=norm)

    def test_layer_norm_of_one_feature(self, make: Any) -> None:
        """Only the sign of the input is left of it."""
        with pytest.warns(UserWarning, match="magnitude"):
            layer = make(1, 4, norm="layer", dtype=torch.float64).eval()
        one = torch.ones(1, 1, 1, dtype=torch.float64)
        torch.testing.assert_close(layer(one)[0], layer(100 * one)[0], rtol=1e-3, atol=1e-3)

    def test_time_steps_with_sequence(self, make: Any) -> None:
        with pytest.raises(ValueError, match=r"time_steps=7.*norm='sequence'.*'frame' or 'hidden'"):
            make(3, 2, norm="sequence", time_steps=7)

    @pytest.mark.parametrize("norm", ["frame", "hidden"])
    @pytest.mark.parametrize("bad", [0, -3, 2.5, "ten", True])
    def test_time_steps_that_are_no_count(self, make: Any, norm: str, bad: Any) -> None:
        with pytest.raises(ValueError, match=rf"time_steps must be a positive integer.*{bad}"):
            make(3, 2, norm=norm, time_steps=bad)

    def test_hidden_with_sync(self, make: Any) -> None:
        with pytest.raises(ValueError, match=r"sync=True.*'hidden'.*'sequence' or 'frame'"):
            make(3, 2, norm="hidden", time_steps=3, sync=True)

    @pytest.mark.parametrize("norm", ["sequence", "frame", "hidden"])
    def test_cell_norm_with_batch_statistics(self, make: Any, norm: str) -> None:
        with pytest.raises(ValueError, match=rf"cell_norm=True.*LSTM.*'layer'.*norm='{norm}'"):
            make(3, 2, norm=norm, cell_norm=True)
        assert make(3, 2, norm=norm, cell_norm=False).norm == norm

    @pytest.mark.parametrize("bad", [0.0, -1e-5, float("nan")])
    def test_eps(self, make: Any, bad: float) -> None:
        with pytest.raises(ValueError, match=f"eps must be positive, got {bad}"):
            make(3, 2, eps=bad)

    @pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
    def test_momentum(self, make: Any, bad: float) -> None:
        with pytest.raises(
            ValueError, match=f"momentum must be None or between 0 and 1, got {bad}"
        ):
            make(3, 2, momentum=bad)

    def test_unknown_keyword(self, make: Any) -> None:
        with pytest.raises(TypeError, match="normalise"):
            make(3, 2, normalise="sequence")

    def test_bias_that_is_no_bool(self, make: Any) -> None:
        """As in torch, where a shifted positional argument shows itself here."""
        with pytest.raises(TypeError) as theirs:
            nn.LSTM(3, 2, bias="yes")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="bias") as mine:
            make(3, 2, bias="yes")
        assert mine.type is theirs.type


def test_unknown_peephole() -> None:
    with pytest.raises(
        ValueError, match=r"unknown peephole='input': choose None, 'output' or 'all'"
    ):
        normrnn.LSTM(3, 2, peephole="input", norm="sequence")  # type: ignore[arg-type]
    for make in (normrnn.RNN, normrnn.GRU):
        with pytest.raises(TypeError, match="peephole"):
            make(3, 2, peephole="all")  # type: ignore[call-arg]


def test_unknown_nonlinearity() -> None:
    with pytest.raises(ValueError, match=r"'gelu'.*'tanh' or 'relu'"):
        normrnn.RNN(3, 2, nonlinearity="gelu", norm="sequence")


def test_projection_with_a_peephole() -> None:
    """Nothing is silently ignored: a peephole has no place in a projected cell."""
    with pytest.raises(ValueError, match=r"proj_size.*peephole|peephole.*proj_size"):
        normrnn.LSTM(3, 4, proj_size=2, norm=None, peephole="all")


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


@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("cell", ["gru", "tanh"])
def test_a_pair_of_states_where_there_is_one(cell: str, norm: str) -> None:
    state = x(1, 2, 2), x(1, 2, 2)
    with pytest.raises(ValueError, match=r"hx of (GRU|RNN) must be one tensor, h_0, got a tuple"):
        build(cell, norm)(x(5, 2, 3), state)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_cell_norm_is_for_the_lstm(cell: str) -> None:
    make = {"gru": normrnn.GRU, "lstm": normrnn.LSTM}[cell]
    if cell == "lstm":
        assert make(3, 2, norm="layer", cell_norm=True).norm == "layer"
    else:
        with pytest.raises(ValueError, match=r"cell_norm=True is for an LSTM.*got GRU"):
            make(3, 2, norm="layer", cell_norm=True)


@pytest.mark.parametrize("norm", ["sequence", "layer", "none"])
def test_no_lengths_for_no_sequences(norm: str) -> None:
    """An empty list is a list of integers."""
    layer = build("gru", norm).eval()
    for lengths in ([], torch.tensor([], dtype=torch.int64)):
        assert layer(x(5, 0, 3), lengths=lengths)[0].shape == (5, 0, 2)


@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("batch_first", [False, True])
class TestLengths:
    """Five frames, three sequences."""

    def refuse(self, norm: str, batch_first: bool, lengths: Any, match: str) -> None:
        layer = build("gru", norm, batch_first=batch_first)
        before = {k: v.clone() for k, v in layer.state_dict().items()}
        given = x(3, 5, 3) if batch_first else x(5, 3, 3)
        with pytest.raises(ValueError, match=match):
            layer(given, lengths=lengths)
        assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())

    def test_negative(self, norm: str, batch_first: bool) -> None:
        wrong = r"not be negative, got lengths \[5, -1, 2\]"
        self.refuse(norm, batch_first, [5, -1, 2], wrong)
        self.refuse(norm, batch_first, torch.tensor([5, -1, 2]), wrong)

    def test_longer_than_the_input(self, norm: str, batch_first: bool) -> None:
        wrong = r"not exceed T=5, got lengths \[5, 6, 2\]"
        self.refuse(norm, batch_first, [5, 6, 2], wrong)

    @pytest.mark.parametrize("lengths", [[5, 2], [5, 2, 1, 1], []])
    def test_of_the_wrong_count(self, norm: str, batch_first: bool, lengths: list[int]) -> None:
        wrong = rf"one number per sequence: expected 3, got shape \({len(lengths)},\)"
        self.refuse(norm, batch_first, lengths, wrong)

    def test_of_the_wrong_kind(self, norm: str, batch_first: bool) -> None:
        self.refuse(norm, batch_first, torch.tensor(5), r"expected 3, got shape \(\)")
        self.refuse(norm, batch_first, [[5, 2, 1]], r"expected 3, got shape \(1, 3\)")
        self.refuse(norm, batch_first, [5.0, 2.0, 1.0], "must be integers, got torch.float32")
        self.refuse(norm, batch_first, [True, True, True], "must be integers, got torch.bool")

    def test_with_packed_or_unbatched_input(self, norm: str, batch_first: bool) -> None:
        layer = build("gru", norm, batch_first=batch_first)
        packed = pack_padded_sequence(x(5, 2, 3), torch.tensor([5, 2]))
        with pytest.raises(ValueError, match=r"lengths= goes with a padded.*PackedSequence"):
            layer(packed, lengths=[5, 2])
        with pytest.raises(ValueError, match=r"3 dimensions, got 2.*unbatched"):
            layer(x(5, 3), lengths=[5])

    def test_feature_size_with_lengths(self, norm: str, batch_first: bool) -> None:
        layer = build("gru", norm, batch_first=batch_first)
        with pytest.raises(RuntimeError, match="Expected 3, got 4"):
            layer(x(5, 5, 4), lengths=[5, 2, 5, 5, 1])

    def test_integers_of_any_kind_are_fine(self, norm: str, batch_first: bool) -> None:
        layer = build("gru", norm, batch_first=batch_first).eval()
        given = x(3, 5, 3) if batch_first else x(5, 3, 3)
        wanted = layer(given, lengths=[5, 2, 3])[0]
        for dtype in (torch.int64, torch.int32, torch.uint8):
            assert torch.equal(
                layer(given, lengths=torch.tensor([5, 2, 3], dtype=dtype))[0], wanted
            )
        assert torch.equal(layer(given, lengths=(5, 2, 3))[0], wanted)


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
