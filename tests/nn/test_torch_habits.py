"""A drop-in: torch's values with norm=None, torch's names, attributes and small habits."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import normrnn
from tests.helpers import CELLS, NORMS, build, reloaded, same

PAIRS = [(normrnn.RNN, nn.RNN), (normrnn.LSTM, nn.LSTM), (normrnn.GRU, nn.GRU)]


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
class TestWithoutNorm:
    @pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
    def test_state_dict_goes_both_ways(self, ours: Any, torchs: Any) -> None:
        for more in ({}, {"proj_size": 2}) if torchs is nn.LSTM else ({},):
            how: dict[str, Any] = {"num_layers": 2, "bidirectional": True, **more}
            mine, plain, other = (
                ours(3, 4, norm=None, **how),
                torchs(3, 4, **how),
                torchs(3, 4, **how),
            )
            assert list(mine.state_dict()) == list(plain.state_dict())
            mine.load_state_dict(plain.state_dict())
            other.load_state_dict(mine.state_dict())
            x, lengths = torch.randn(5, 3, 3), torch.tensor([2, 5, 3])
            packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
            same(mine(x), plain(x))
            same(other(x), plain(x))
            same(mine(packed), plain(packed), 1e-5)
            padded, _ = mine(x, lengths=[2, 5, 3])
            same(padded, nn.utils.rnn.pad_packed_sequence(plain(packed)[0])[0], 1e-5)

    @pytest.mark.parametrize("batch_first", [False, True])
    def test_training_at_an_everyday_size_equals_torch(
        self, ours: Any, torchs: Any, batch_first: bool
    ) -> None:
        """Outputs, every gradient, and the masks of dropout."""
        how: dict[str, Any] = {"num_layers": 2, "dropout": 0.3, "batch_first": batch_first}
        mine, plain = ours(9, 40, norm=None, **how), torchs(9, 40, **how)
        mine.load_state_dict(plain.state_dict())
        x = torch.randn(30, 6, 9, requires_grad=True)
        found = []
        for layer in (mine, plain):
            torch.manual_seed(3)
            out, _ = layer(x)
            out.square().sum().backward()
            found.append([out, x.grad, *(p.grad for p in layer.parameters())])
            x.grad = None
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)

    def test_arguments(self, ours: Any, torchs: Any) -> None:
        """torch's position by position, ours by keyword; those of statistics are unused without a
        norm, so that switching ``norm`` is a one-word change."""
        positional = ("tanh",) if torchs is nn.RNN else ()
        arguments = (3, 4, 2, *positional, False, True, 0.25, True)
        mine, plain = ours(*arguments, norm=None), torchs(*arguments)
        names = "mode input_size hidden_size num_layers bias batch_first dropout bidirectional"
        for name in (*names.split(), "proj_size"):
            assert getattr(mine, name) == getattr(plain, name), name
        kinds = [p.kind for p in inspect.signature(ours).parameters.values()]
        assert inspect.Parameter.VAR_POSITIONAL not in kinds
        unused = {"eps": 1e-3, "momentum": None, "affine": False, "track_running_stats": False}
        unused |= {"gamma": 0.1, "cell_norm": True, "time_steps": 7, "sync": True}
        layer = ours(3, 4, norm=None, **unused)
        assert list(layer.state_dict()) == list(torchs(3, 4).state_dict())
        assert not list(layer.children())


CELL_ROWS = {"tanh": 1, "lstm": 4, "lstm-output": 4, "lstm-all": 4, "gru": 3, "ligru": 2}
TORCH_KEYS = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
STATISTICS = {f"norm_l0.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")}
NORM_KEYS = {"norm_l0.weight", "norm_l0.bias"} | STATISTICS
PEEPHOLE_KEYS = {
    "lstm-output": ["weight_co_l0"],
    "lstm-all": ["weight_ci_l0", "weight_cf_l0", "weight_co_l0"],
}


@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("cell", list(CELL_ROWS))
def test_state_dict_keys_and_shapes(cell: str, norm: str) -> None:
    """Pinned: checkpoints outlive refactoring. H = 2, I = 3, K = 3."""
    rows, slots = CELL_ROWS[cell] * 2, (3,) if NORMS[norm].get("time_steps") else ()
    expected: dict[str, tuple[int, ...]] = {"weight_ih_l0": (rows, 3), "weight_hh_l0": (rows, 2)}
    vectors = {"bias": rows, "weight": rows}
    pooled = {"": rows}
    if norm == "none":
        vectors, pooled = {}, {}
        expected |= {"bias_ih_l0": (rows,), "bias_hh_l0": (rows,)}
    elif norm == "whiten":
        vectors, pooled = {"bias": rows}, {}
        own = {"running_mean": (3,), "running_cov": (3, 3), "num_batches_tracked": ()}
        expected |= {f"norm_l0.{name}": shape for name, shape in own.items()}
    elif norm in ("layer", "rms"):
        vectors, pooled = vectors | {"gamma_hh": rows}, {}
    elif norm.startswith("recurrent"):
        vectors, pooled = vectors | {"gamma_hh": rows}, pooled | {"_hh": rows}
        if norm == "recurrent" and cell.startswith("lstm"):
            vectors, pooled = vectors | {"weight_c": 2, "bias_c": 2}, pooled | {"_c": 2}
    expected |= {f"norm_l0.{name}": (width,) for name, width in vectors.items()}
    expected |= {"norm_l0.num_batches_tracked": slots} if pooled else {}
    for which, width in pooled.items():
        for name in ("running_mean", "running_var"):
            expected[f"norm_l0.{name}{which}"] = (*slots, width)
    expected |= {"bias_hn_l0": (2,)} if cell == "gru" and norm != "none" else {}
    expected |= dict.fromkeys(PEEPHOLE_KEYS.get(cell, []), (2,))
    layer = build(cell, norm)
    assert isinstance(layer, nn.RNNBase)
    assert {k: tuple(v.shape) for k, v in layer.state_dict().items()} == expected
    both = build(cell, norm, num_layers=2, bidirectional=True)
    names = {key.replace("_l0", f"_{end}") for key in expected for end in both._suffixes}
    shapes = {k: tuple(v.shape) for k, v in both.state_dict().items()}
    assert set(shapes) == names
    assert both._suffixes == ["l0", "l0_reverse", "l1", "l1_reverse"]
    assert shapes["weight_ih_l0_reverse"] == (rows, 3)
    assert shapes["weight_ih_l1"] == shapes["weight_ih_l1_reverse"] == (rows, 4)


BOTH = {f"norm_l0.{name}" for name in ("weight", "gamma_hh", "bias")}
CELL = {"norm_l0.weight_c", "norm_l0.bias_c"}


@pytest.mark.parametrize(
    ("kind", "options", "more"),
    [
        ("LSTM", {}, NORM_KEYS),
        ("LSTM", {"bias": False}, STATISTICS | {"norm_l0.weight"}),
        ("GRU", {"bias": False}, STATISTICS | {"norm_l0.weight"}),
        ("LSTM", {"affine": False}, STATISTICS),
        ("GRU", {"affine": False}, STATISTICS | {"bias_hn_l0"}),
        ("LSTM", {"track_running_stats": False}, NORM_KEYS - STATISTICS),
        ("LSTM", {"norm": None, "bias": False}, set()),
        ("LSTM", {"norm": None, "proj_size": 1}, {*TORCH_KEYS[2:], "weight_hr_l0"}),
        ("LSTM", {"norm": "layer"}, BOTH),
        ("LSTM", {"norm": "layer", "cell_norm": True}, BOTH | CELL),
        ("LSTM", {"norm": "layer", "cell_norm": True, "affine": False}, set()),
        (
            "LSTM",
            {"norm": "layer", "cell_norm": True, "bias": False},
            (BOTH | CELL) - {"norm_l0.bias", "norm_l0.bias_c"},
        ),
    ],
)
def test_keys_of_the_options(kind: str, options: Any, more: set[str]) -> None:
    layer = getattr(normrnn, kind)(3, 2, **{"norm": "sequence", **options})
    assert set(layer.state_dict()) == {*TORCH_KEYS[:2]} | more


class TestInitialValues:
    @pytest.mark.parametrize("norm", ["sequence", "frame-slots", "hidden", "layer"])
    def test_reset_parameters(self, norm: str) -> None:
        """A reset over all parameters does not overwrite γ."""
        layer = build("lstm-all", norm, bidirectional=True, gamma=0.3)
        old = {name: p.detach().clone() for name, p in layer.named_parameters()}
        layer.reset_parameters()
        for name, parameter in layer.named_parameters():
            if name.startswith("norm_") and ".weight" in name:
                assert torch.equal(parameter, torch.full_like(parameter, 0.3))
            elif name.endswith(".bias"):
                assert torch.equal(parameter, torch.zeros_like(parameter))
            else:
                assert not torch.equal(parameter, old[name])
                assert parameter.abs().max() <= 2**-0.5
        for normaliser in layer.normalisers() if norm != "layer" else ():
            assert normaliser.running_mean.abs().max() == 0
            assert bool((normaliser.running_var == 1).all())
            assert normaliser.num_batches_tracked.sum() == 0

    @pytest.mark.parametrize("norm", ["sequence", None])
    @pytest.mark.parametrize(("ours", "torchs"), PAIRS)
    def test_weights_are_drawn_as_torch_draws_them(self, ours: Any, torchs: Any, norm: Any) -> None:
        torch.manual_seed(2)
        mine = dict(ours(3, 4, num_layers=2, norm=norm).named_parameters())
        torch.manual_seed(2)
        for name, parameter in torchs(3, 4, num_layers=2, bias=norm is None).named_parameters():
            assert torch.equal(mine[name], parameter)

    def test_peepholes_and_the_candidates_bias_are_drawn_too(self) -> None:
        for layer in (
            normrnn.LSTM(3, 64, peephole="all", norm="sequence"),
            normrnn.GRU(3, 64, norm="sequence"),
        ):
            drawn = [
                p for name, p in layer.named_parameters() if name[:8] in ("weight_c", "bias_hn_")
            ]
            assert len(drawn) == (3 if isinstance(layer, normrnn.LSTM) else 1)
            for vector in drawn:
                assert 0.05 < vector.abs().max() <= 0.125
                assert vector.unique().numel() > 32


def test_representation() -> None:
    layer = normrnn.LSTM(3, 4, num_layers=2, bidirectional=True, peephole="all", norm="frame")
    text = layer.extra_repr()
    assert text == "3, 4, num_layers=2, bidirectional=True, norm='frame', peephole='all'"
    assert normrnn.GRU(3, 4, norm=None).extra_repr() == "3, 4, norm=None"
    shown = repr(normrnn.RNN(3, 4, norm="hidden", time_steps=9))
    assert "time_steps=9" in shown
    assert "(norm_l0): Normaliser(4" in shown


class TestDropout:
    @pytest.mark.parametrize("norm", list(NORMS))
    def test_only_in_training_and_by_the_seed(self, norm: str) -> None:
        layer = build("gru", norm, num_layers=2, dropout=0.5, momentum=0.0)
        x, found = torch.randn(6, 40, 3, dtype=torch.float64), []
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            found.append(layer(x)[0])
        assert torch.equal(found[0], found[2])
        assert not torch.equal(found[0], found[1])
        layer.eval()
        assert torch.equal(layer(x)[0], layer(x)[0])
        with pytest.warns(UserWarning, match="dropout"):  # not on the last layer
            layer = build("gru", norm, num_layers=1, dropout=0.5, momentum=0.0)
        assert torch.equal(layer(x)[0], layer(x)[0])

    def test_rate_and_scale(self) -> None:
        """The second layer copies its input: relu(I x) of relu outputs, one at a time."""
        how: dict[str, Any] = {"dropout": 0.3, "dtype": torch.float64, "norm": "sequence"}
        layer = normrnn.RNN(3, 3, num_layers=2, nonlinearity="relu", **how)
        with torch.no_grad():
            for name in ("weight_ih_l0", "weight_ih_l1"):
                getattr(layer, name).copy_(torch.eye(3))
            for name in ("weight_hh_l0", "weight_hh_l1"):
                getattr(layer, name).zero_()
        for normaliser in layer.normalisers():
            normaliser.eval()
            normaliser.eps = 1e-12
        x = torch.ones(50, 40, 3, dtype=torch.float64)
        out = layer(x)[0]
        kept = (out > 0).double().mean()
        assert 0.68 < kept < 0.72
        torch.testing.assert_close(out[out > 0], torch.full_like(out[out > 0], 1 / 0.7))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", CELLS)
def test_copies_and_files(cell: str, norm: str) -> None:
    layer = build(cell, norm, num_layers=2, bidirectional=True)
    x = torch.randn(5, 3, 3, dtype=torch.float64)
    layer(x)[0].sum().backward()
    fresh = build(cell, norm, num_layers=2, bidirectional=True)
    wanted = layer.eval()(x)[0]
    assert not torch.equal(fresh.eval()(x)[0], wanted)
    fresh.load_state_dict(reloaded(layer.state_dict()))
    twins = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), reloaded(layer), fresh
    for twin in twins:
        assert type(twin) is type(layer)
        assert torch.equal(twin(x)[0], wanted)
        twin.train()(x)[0].sum().backward()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert torch.equal(layer(x)[0], wanted)
