"""Mistakes raise errors that name the value and the choices, and change nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import normrnn
from tests.helpers import NORMS, STATISTICAL, build, unchanged

RNN, LSTM, GRU = normrnn.RNN, normrnn.LSTM, normrnn.GRU
LAYERS = [RNN, LSTM, GRU]
CELLS = {normrnn.RNNCell: "RNN", normrnn.LSTMCell: "LSTM", normrnn.GRUCell: "GRU"}
PAIRS = {"tanh": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
CHOICES = "'sequence', 'frame', 'hidden', 'layer', .*None"
EVERY_LAYER: list[tuple[dict[str, Any], str]] = [
    *(({"norm": n}, rf"norm={n!r}.*{CHOICES}") for n in ("None", "", 1, True)),
    ({"norm": "batch"}, "'batch'.*'sequence'.*'frame'"),
    *(({"norm": n, "time_steps": 7}, f"time_steps=7.*'{n}'") for n in ("sequence", "whiten")),
    *(({"norm": "frame", "time_steps": k}, f"time_steps.*{k}") for k in (0, -3, 2.5, "ten", True)),
    ({"norm": "hidden", "time_steps": 3, "sync": True}, "sync=True.*'hidden'.*'sequence'"),
    ({"norm": "recurrent", "sync": True}, "sync=True.*'recurrent'"),
    *(
        ({"norm": n, "cell_norm": True}, f"LSTM.*norm='{n}'")
        for n in ("sequence", "frame", "hidden")
    ),
    *(({"eps": e}, f"eps.*{e}") for e in (0.0, -1e-5, float("nan"))),
    *(({"momentum": m}, f"momentum.*{m}") for m in (-0.1, 1.1, float("nan"))),
    *(({"weight_drop": share}, rf"weight_drop.*\[0, 1\).*{share}") for share in (1.0, -0.1, 2)),
    ({"zoneout": (0.1, 1.0)}, r"zoneout.*\[0, 1\).*1\.0"),
    ({"dropout_kind": "rows"}, "dropout_kind='rows'.*'element'.*'locked'"),
    ({"norm": "whiten", "shrinkage": 2}, r"shrinkage.*\[0, 1\].*2"),
]
ONE_LAYER: list[tuple[Any, dict[str, Any], str]] = [
    *((make, {"norm": "layer", "cell_norm": True}, f"cell_norm=True.*{make.__name__}")
      for make in (RNN, GRU)),
    (GRU, {"norm": "recurrent", "cell_norm": True}, "cell_norm=True.*LSTM"),
    (GRU, {"zoneout": (0.1, 0.2)}, r"zoneout.*LSTM.*\(0\.1, 0"),
    (LSTM, {"peephole": "input"}, "peephole='input'.*'output'.*'all'"),
    (RNN, {"nonlinearity": "gelu"}, "'gelu'.*'tanh' or 'relu'"),
    (LSTM, {"proj_size": 1, "norm": None, "peephole": "all"}, "peephole"),
    *((LSTM, {"proj_size": 1, "norm": None, **more}, "proj_size")
      for more in ({"weight_drop": 0.1}, {"zoneout": (0.1, 0.1)}, {"dropout_kind": "locked"})),
    *((make, {"norm": norm}, rf"'{norm}'.*normrnn\.{name}.*'layer'")
      for make, name in CELLS.items() for norm in sorted({NORMS[n]["norm"] for n in STATISTICAL})),
    *((make, {"norm": "batch"}, "'batch'") for make in CELLS),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "options", "match"),
    [*((make, *case) for make in LAYERS for case in EVERY_LAYER), *ONE_LAYER],
)
def test_values_of_arguments(make: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make(3, 2, **{**({} if make in CELLS else {"norm": "sequence"}), **options})


@pytest.mark.parametrize("make", [*LAYERS, *CELLS])
def test_names_and_types_of_arguments(make: Any) -> None:
    for options in ({"normalise": "sequence"}, {"eps_": 1.0}):
        with pytest.raises(TypeError, match=next(iter(options))):
            make(3, 2, **options)
    if make in LAYERS:
        with pytest.raises(TypeError, match="bias"):  # as in torch: a shifted position shows here
            make(3, 2, bias="yes")
    if make is not LSTM:
        with pytest.raises(TypeError, match="peephole"):
            make(3, 2, peephole="all")


@pytest.mark.parametrize("make", LAYERS)
def test_layer_norm_of_one_feature_warns(make: Any) -> None:
    """Only the sign of the input is left of it."""
    with pytest.warns(UserWarning, match="magnitude"):
        layer = make(1, 4, norm="layer", dtype=torch.float64).eval()
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    torch.testing.assert_close(layer(one)[0], layer(100 * one)[0], rtol=1e-3, atol=1e-3)


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def packed(T: int, B: int, features: int) -> PackedSequence:
    return pack_padded_sequence(x(T, B, features), torch.tensor([T, 2]))


def state(cell: str, *shape: int) -> Any:
    return (x(*shape), x(*shape)) if cell == "lstm" else x(*shape)


def refuse(layer: Any, error: Any, match: str | None, *given: Any, **more: Any) -> None:
    """The call raises, and no buffer or parameter has changed."""
    with unchanged(layer), pytest.raises(error, match=match):
        layer(*given, **more)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_where_torch_raises_ours_raises_the_same_type(norm: str, training: bool) -> None:
    """And names the same numbers."""
    for cell, make in PAIRS.items():
        layer = build(cell, norm, num_layers=2).train(training)
        plain = make(3, 2, num_layers=2, dtype=torch.float64)
        cases: list[tuple[Any, ...]] = [
            *(("Expected 3, got 4", wide) for wide in (x(5, 2, 4), x(5, 4), packed(5, 2, 4))),
            ("2D or 3D, got 1D", x(5)),
            ("2D or 3D, got 4D", x(5, 2, 3, 1)),
            ("[23]-D", x(5, 2, 3), state(cell, 2, 2)),
            ("[23]-D", x(5, 3), state(cell, 2, 1, 2)),
        ]
        for wrong in ((2, 3, 2), (1, 2, 2), (2, 2, 3)):
            match = r"hidden.*\(2, 2, 2\), got \[" + ", ".join(map(str, wrong))
            cases += [
                (match, given, state(cell, *wrong)) for given in (x(5, 2, 3), packed(5, 2, 3))
            ]
        if cell == "lstm":
            match = r"hidden\[1\].*\(2, 2, 2\), got \[2, 3, 2\]"
            cases.append((match, x(5, 2, 3), (x(2, 2, 2), x(2, 3, 2))))
        for match, *given in cases:
            with pytest.raises(Exception) as theirs:
                plain(*given)
            refuse(layer, theirs.type, match, *given)


BATCH = x(5, 3, 3)
PAIR = pack_padded_sequence(x(5, 2, 3), torch.tensor([2, 5]), enforce_sorted=False)


def bits(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def packed_bits(lengths: list[int], enforce_sorted: bool = False) -> PackedSequence:
    return pack_padded_sequence(bits(5, 2), torch.tensor(lengths), enforce_sorted=enforce_sorted)


CALLS: list[tuple[Tensor | PackedSequence, dict[str, Any], str]] = [
    *((BATCH, {"lengths": wrong}, match) for wrong, match in [
        ([5, -1, 2], r"negative.*\[5, -1, 2\]"),
        (torch.tensor([5, -1, 2]), r"negative.*\[5, -1, 2\]"),
        ([5, 6, 2], r"T=5.*\[5, 6, 2\]"),
        ([5, 2], r"3, got shape \(2,\)"),
        ([], r"3, got shape \(0,\)"),
        (torch.tensor(5), r"3, got shape \(\)"),
        ([[5, 2, 1]], r"3, got shape \(1, 3\)"),
        ([5.0, 2.0, 1.0], "integers.*float32"),
        ([True, True, True], "integers.*bool"),
    ]),
    (PAIR, {"lengths": [5, 2]}, "lengths=.*PackedSequence"),
    (x(5, 3), {"lengths": [5]}, "3 dimensions, got 2.*unbatched"),
    (BATCH, {"resets": bits(3, 5)}, r"\(5, 3\), got \(3, 5\)"),
    (BATCH, {"resets": bits(3, 5), "lengths": [5, 1, 2]}, r"\(5, 3\), got \(3, 5\)"),
    (BATCH[:, 0], {"resets": bits(3, 5)}, r"\(5,\), got \(3, 5\)"),
    (BATCH, {"resets": bits(5, 3, dtype=torch.float32)}, r"bool.*float32.*resets\.bool"),
    (BATCH, {"resets": bits(5, 3, dtype=torch.uint8)}, "bool.*uint8"),
    (PAIR, {"resets": bits(5, 2)}, "PackedSequence.*Tensor"),
    (x(5, 2, 3), {"resets": packed_bits([2, 5])}, "is packed and the input is not"),
    (PAIR, {"resets": packed_bits([5, 2], True)}, "sorted_indices"),
    (PAIR, {"resets": packed_bits([3, 4])}, "batch_sizes"),
    (BATCH, {"reset_to": x(1, 1, 2)}, "resets"),
    (BATCH, {"resets": bits(5, 3), "reset_to": (x(1, 1, 2), x(1, 1, 2))}, "reset_to"),
    *((BATCH, {"resets": bits(5, 3), "reset_to": x(*shape)}, "reset_to")
      for shape in ((1, 2, 2), (2, 1, 2), (1, 1, 3))),
    (BATCH, {"hx": (x(1, 3, 2), x(1, 3, 2))}, "hx.*GRU.*h_0.*tuple"),
]  # fmt: skip


@pytest.mark.parametrize("norm", ["sequence", "layer", "none"])
@pytest.mark.parametrize(("given", "more", "match"), CALLS)
def test_arguments_of_a_call(given: Any, more: dict[str, Any], match: str, norm: str) -> None:
    refuse(build("gru", norm), (ValueError, RuntimeError), match, given, **more)
    if isinstance(given, Tensor) and given.dim() == 3 and "resets" not in more:
        layer = build("gru", norm, batch_first=True)
        refuse(layer, (ValueError, RuntimeError), match, given.transpose(0, 1), **more)


@pytest.mark.parametrize("norm", ["sequence", "frame", "hidden"])
@pytest.mark.parametrize("state", [torch.zeros(1, 2, 2), (torch.zeros(1, 2, 2),), (1, 2)])
def test_lstm_without_a_pair_of_states(norm: str, state: Any) -> None:
    layer = build("lstm", norm, dtype=torch.float32)
    refuse(layer, (ValueError, RuntimeError), None, torch.randn(5, 2, 3), state)


@pytest.mark.parametrize("norm", ["frame", None])
@pytest.mark.parametrize("make", LAYERS)
def test_hints(make: Any, norm: Any) -> None:
    """For lengths in the place of hx, and a forgotten batch_first."""
    layer = make(3, 2, norm=norm, dtype=torch.float64)
    for lengths in ([5, 4], (5, 4), torch.tensor([5, 4])):
        refuse(layer, (ValueError, RuntimeError), "lengths=", x(5, 2, 3), lengths)
    refuse(layer, ValueError, "batch_first=True", x(2, 5, 3), lengths=[5, 4])
    hx = state("lstm" if make is LSTM else "gru", 1, 2, 2)
    refuse(layer, RuntimeError, "batch_first=True", x(2, 5, 3), hx)


@pytest.mark.parametrize("norm", NORMS)
def test_lengths_of_any_integer_type(norm: str) -> None:
    layer, given = build("gru", norm, num_layers=2, bidirectional=True).eval(), x(5, 3, 3)
    wanted = layer(given, lengths=[5, 2, 3])[0]
    kinds = [torch.tensor([5, 2, 3], dtype=d) for d in (torch.int64, torch.int32, torch.uint8)]
    for lengths in (*kinds, (5, 2, 3)):
        assert torch.equal(layer(given, lengths=lengths)[0], wanted)
    torch.testing.assert_close(layer(given, lengths=[5, 5, 5]), layer(given), rtol=0, atol=0)


@pytest.mark.parametrize("make", CELLS)
def test_cells_raise_torchs_types(make: Any) -> None:
    is_lstm, h = make is normrnn.LSTMCell, torch.zeros(2, 4)
    for given, hx in (
        (torch.zeros(2, 2, 3), None),
        (torch.zeros(2, 5), None),
        (torch.zeros(2, 3), torch.zeros(2, 5)),
        (torch.zeros(2, 3), h.double()),
        (torch.zeros(2, 3), h[None]),
    ):
        arguments = (given, (hx, hx) if is_lstm else hx) if hx is not None else (given,)
        with pytest.raises((ValueError, RuntimeError)) as theirs:
            getattr(nn, make.__name__)(3, 4)(*arguments)
        refuse(make(3, 4), theirs.type, None, *arguments)
