"""A drop-in: torch's values with norm=None, torch's names, attributes and small habits."""

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import normrnn
from tests.helpers import NORMS, build, close

PAIRS = [(normrnn.RNN, nn.RNN), (normrnn.LSTM, nn.LSTM), (normrnn.GRU, nn.GRU)]


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
class TestWithoutNorm:
    def test_state_dict_goes_both_ways(self, ours: Any, torchs: Any) -> None:
        how: dict[str, Any] = {"num_layers": 2, "bidirectional": True}
        mine, plain = ours(3, 4, norm=None, **how), torchs(3, 4, **how)
        assert list(mine.state_dict()) == list(plain.state_dict())
        mine.load_state_dict(plain.state_dict())
        other = torchs(3, 4, **how)
        other.load_state_dict(mine.state_dict())
        x = torch.randn(5, 2, 3)
        for layer in (mine, other):
            out, final = layer(x)
            wanted, wanted_final = plain(x)
            assert torch.equal(out, wanted)
            torch.testing.assert_close(final, wanted_final, rtol=0, atol=0)

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

    def test_ragged_input_equals_torch(self, ours: Any, torchs: Any) -> None:
        plain = torchs(3, 4, 2, bidirectional=True, dtype=torch.float64)
        mine = ours(3, 4, 2, bidirectional=True, dtype=torch.float64, norm=None)
        mine.load_state_dict(plain.state_dict())
        x = torch.randn(5, 3, 3, dtype=torch.float64)
        packed = pack_padded_sequence(x, torch.tensor([2, 5, 3]), enforce_sorted=False)
        (out, final), (wanted, wanted_final) = mine(packed), plain(packed)
        close(out.data, wanted.data, "rows", 1e-12)
        for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
            assert torch.equal(getattr(out, name), getattr(wanted, name))
        torch.testing.assert_close(final, wanted_final, rtol=1e-12, atol=1e-12)
        padded, _ = mine(x, lengths=[2, 5, 3])
        wanted_padded = nn.utils.rnn.pad_packed_sequence(wanted)[0]
        close(padded, wanted_padded, "padded", 1e-12)

    def test_statistics_arguments_are_accepted_and_unused(self, ours: Any, torchs: Any) -> None:
        """Switching ``norm`` is a one-word change."""
        layer = ours(
            3,
            4,
            norm=None,
            eps=1e-3,
            momentum=None,
            affine=False,
            track_running_stats=False,
            gamma=0.1,
            cell_norm=True,
            time_steps=7,
            sync=True,
        )
        assert list(layer.state_dict()) == list(torchs(3, 4).state_dict())
        assert not list(layer.children())

    def test_signature_starts_with_torchs(self, ours: Any, torchs: Any) -> None:
        """Position by position; what comes on top goes by keyword only."""
        torch.manual_seed(0)
        positional = ("tanh",) if torchs is nn.RNN else ()
        arguments = (3, 4, 2, *positional, False, True, 0.25, True)
        mine, plain = ours(*arguments, norm=None), torchs(*arguments)
        for name in (
            "mode",
            "input_size",
            "hidden_size",
            "num_layers",
            "bias",
            "batch_first",
            "dropout",
            "bidirectional",
            "proj_size",
        ):
            assert getattr(mine, name) == getattr(plain, name), name
        kinds = [p.kind for p in inspect.signature(ours).parameters.values()]
        assert kinds.count(inspect.Parameter.VAR_POSITIONAL) == 0

    def test_sizes_of_zero_are_torchs_errors(self, ours: Any, torchs: Any) -> None:
        for bad in ((0, 4), (3, 0), (3, 4, 0), (3, 4.5), (3, -1)):
            with pytest.raises((ValueError, TypeError, RuntimeError)) as theirs:
                torchs(*bad)
            with pytest.raises(theirs.type) as mine:
                ours(*bad)
            assert str(mine.value) == str(theirs.value)


CELL_ROWS = {"tanh": 1, "lstm": 4, "lstm-output": 4, "lstm-all": 4, "gru": 3}
TORCH_KEYS = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
NORM_KEYS = [
    "norm_l0.weight",
    "norm_l0.bias",
    "norm_l0.running_mean",
    "norm_l0.running_var",
    "norm_l0.num_batches_tracked",
]
PEEPHOLE_KEYS = {
    "tanh": [],
    "lstm": [],
    "gru": [],
    "lstm-output": ["weight_co_l0"],
    "lstm-all": ["weight_ci_l0", "weight_cf_l0", "weight_co_l0"],
}


@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("cell", list(CELL_ROWS))
def test_state_dict_keys_and_shapes(cell: str, norm: str) -> None:
    """Pinned: checkpoints outlive refactoring. H = 2, I = 3, K = 3."""
    rows = CELL_ROWS[cell] * 2
    expected: dict[str, tuple[int, ...]] = {"weight_ih_l0": (rows, 3), "weight_hh_l0": (rows, 2)}
    if norm == "none":
        expected |= {"bias_ih_l0": (rows,), "bias_hh_l0": (rows,)}
    else:
        slots = (3,) if NORMS[norm].get("time_steps") else ()
        expected["norm_l0.bias"] = (rows,)
        if norm != "whiten":
            expected["norm_l0.weight"] = (rows,)
        if norm in ("layer", "rms"):
            expected["norm_l0.gamma_hh"] = (rows,)
        elif norm == "whiten":
            expected |= {
                "norm_l0.running_mean": (3,),
                "norm_l0.running_cov": (3, 3),
                "norm_l0.num_batches_tracked": (),
            }
        else:
            expected |= {
                "norm_l0.running_mean": (*slots, rows),
                "norm_l0.running_var": (*slots, rows),
                "norm_l0.num_batches_tracked": slots,
            }
        if norm.startswith("recurrent"):
            cells = {"_c": 2} if cell.startswith("lstm") and norm == "recurrent" else {}
            for which, width in ({"_hh": rows} | cells).items():
                gamma = "gamma_hh" if which == "_hh" else "weight_c"
                expected[f"norm_l0.{gamma}"] = (width,)
                for name in ("running_mean", "running_var"):
                    expected[f"norm_l0.{name}{which}"] = (*slots, width)
            expected |= {"norm_l0.bias_c": (2,)} if cells else {}
        if cell == "gru":
            expected["bias_hn_l0"] = (2,)
    expected |= dict.fromkeys(PEEPHOLE_KEYS[cell], (2,))
    layer = build(cell, norm)
    assert {k: tuple(v.shape) for k, v in layer.state_dict().items()} == expected
    both = build(cell, norm, num_layers=2, bidirectional=True)
    names = {
        key.replace("_l0", f"_l{level}{end}")
        for key in expected
        for level in (0, 1)
        for end in ("", "_reverse")
    }
    assert set(both.state_dict()) == names
    shapes = {k: tuple(v.shape) for k, v in both.state_dict().items()}
    assert shapes["weight_ih_l0_reverse"] == (rows, 3)
    assert shapes["weight_ih_l1"] == shapes["weight_ih_l1_reverse"] == (rows, 4)


BOTH = {f"norm_l0.{name}" for name in ("weight", "gamma_hh", "bias")}
CELL = {"norm_l0.weight_c", "norm_l0.bias_c"}
STATISTICS = set(NORM_KEYS[2:])


@pytest.mark.parametrize(
    ("kind", "options", "more"),
    [
        ("LSTM", {}, set(NORM_KEYS)),
        ("LSTM", {"bias": False}, STATISTICS | {"norm_l0.weight"}),
        ("GRU", {"bias": False}, STATISTICS | {"norm_l0.weight"}),
        ("LSTM", {"affine": False}, STATISTICS),
        ("GRU", {"affine": False}, STATISTICS | {"bias_hn_l0"}),
        ("LSTM", {"track_running_stats": False}, set(NORM_KEYS[:2])),
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
    def test_gamma_and_beta(self) -> None:
        """γ starts at 1 unless asked otherwise."""
        for gamma, layer in (
            (1.0, normrnn.GRU(3, 2, norm="sequence")),
            (1.0, normrnn.GRU(3, 2, gamma=None, norm="sequence")),
            (0.1, normrnn.GRU(3, 2, gamma=0.1, norm="sequence")),
        ):
            state = layer.state_dict()
            assert torch.equal(state["norm_l0.weight"], torch.full((6,), gamma))
            assert torch.equal(state["norm_l0.bias"], torch.zeros(6))
            assert torch.equal(state["norm_l0.running_mean"], torch.zeros(6))
            assert torch.equal(state["norm_l0.running_var"], torch.ones(6))
            assert state["norm_l0.num_batches_tracked"].item() == 0

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
    x = torch.linspace(-2, 2, 6 * 40 * 3, dtype=torch.float64).view(6, 40, 3)

    @pytest.mark.parametrize("norm", list(NORMS))
    def test_only_in_training_and_by_the_seed(self, norm: str) -> None:
        layer = build("gru", norm, num_layers=2, dropout=0.5, momentum=0.0)
        torch.manual_seed(1)
        first = layer(self.x)[0]
        second = layer(self.x)[0]
        torch.manual_seed(1)
        again = layer(self.x)[0]
        assert torch.equal(first, again)
        assert not torch.equal(first, second)
        layer.eval()
        assert torch.equal(layer(self.x)[0], layer(self.x)[0])

    def test_not_on_the_last_layer_nor_the_recurrence(self) -> None:
        with pytest.warns(UserWarning, match="dropout"):
            layer = build("gru", "sequence", num_layers=1, dropout=0.5)
        assert torch.equal(layer(self.x)[0], layer(self.x)[0])

    def test_rate_and_scale(self) -> None:
        """The second layer copies its input: relu(I x) of relu outputs, one at a time."""
        layer = normrnn.RNN(
            3,
            3,
            num_layers=2,
            nonlinearity="relu",
            dropout=0.3,
            dtype=torch.float64,
            norm="sequence",
        )
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


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projection_with_norm_none_is_torchs() -> None:
    plain = nn.LSTM(3, 4, proj_size=2, bidirectional=True)
    mine = normrnn.LSTM(3, 4, proj_size=2, bidirectional=True, norm=None)
    mine.load_state_dict(plain.state_dict())
    x = torch.randn(5, 3, 3)
    torch.testing.assert_close(mine(x), plain(x), rtol=0, atol=0)
    packed = pack_padded_sequence(x, torch.tensor([5, 4, 2]))
    torch.testing.assert_close(mine(packed)[0].data, plain(packed)[0].data, rtol=0, atol=0)
    padded = mine(x, lengths=[5, 4, 2])[0]
    assert padded.shape == (5, 3, 4)
    assert padded[4, 1].abs().max() == 0


@pytest.mark.parametrize("norm", list(NORMS))
class TestShapes:
    def test_batch_first_is_a_transpose(self, norm: str) -> None:
        layer = build("lstm", norm, bidirectional=True).eval()
        other = build("lstm", norm, bidirectional=True, batch_first=True).eval()
        other.load_state_dict(layer.state_dict())
        x = torch.randn(5, 4, 3, dtype=torch.float64)
        (a, (ha, ca)), (b, (hb, cb)) = layer(x), other(x.transpose(0, 1))
        torch.testing.assert_close(a.transpose(0, 1), b, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close((ha, ca), (hb, cb), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("batch_first", [False, True])
    def test_what_torch_returns(self, norm: str, batch_first: bool) -> None:
        layer = build("lstm", norm, num_layers=2, bidirectional=True, batch_first=batch_first)
        layer.eval()
        plain = nn.LSTM(3, 2, 2, bidirectional=True, batch_first=batch_first, dtype=torch.float64)
        for shape in ((5, 4, 3), (5, 3)):
            x = torch.randn(shape, dtype=torch.float64)
            (mine, state), (theirs, their_state) = layer(x), plain(x)
            assert isinstance(state, tuple)
            assert mine.shape == theirs.shape
            assert [s.shape for s in state] == [s.shape for s in their_state]
        gru = build("gru", norm).eval()
        assert isinstance(gru(torch.randn(5, 3, dtype=torch.float64))[1], Tensor)

    def test_state_carried_over_windows(self, norm: str) -> None:
        """Eval mode: two windows with the state between them are one long window."""
        if "time_steps" in NORMS[norm]:
            options: dict[str, Any] = {"time_steps": 1}
        else:
            options = {}
        layer = build("lstm", norm, num_layers=2, **options).eval()
        x = torch.randn(6, 3, 3, dtype=torch.float64)
        whole, final = layer(x)
        first, state = layer(x[:2])
        second, last = layer(x[2:], state)
        close(torch.cat([first, second]), whole, "output", 1e-12)
        torch.testing.assert_close(last, final, rtol=1e-12, atol=1e-12)

    def test_copies_and_files(self, norm: str) -> None:
        layer = build("lstm-all", norm, num_layers=2, bidirectional=True)
        x = torch.randn(5, 3, 3, dtype=torch.float64)
        layer(x)[0].sum().backward()
        layer.eval()
        wanted = layer(x)[0]
        twin = copy.deepcopy(layer)
        assert torch.equal(twin(x)[0], wanted)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert torch.equal(layer(x)[0], wanted)
        thawed = pickle.loads(pickle.dumps(layer))
        assert torch.equal(thawed(x)[0], wanted)
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        fresh = build("lstm-all", norm, num_layers=2, bidirectional=True).eval()
        assert not torch.equal(fresh(x)[0], wanted)
        fresh.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(fresh(x)[0], wanted)

    def test_functional_call_differentiates(self, norm: str) -> None:
        layer = build("lstm", norm)
        x = torch.randn(5, 3, 3, dtype=torch.float64)
        values = {k: v.detach().clone().requires_grad_() for k, v in layer.named_parameters()}
        torch.func.functional_call(layer, values, (x,))[0].sum().backward()
        layer(x)[0].sum().backward()
        for name, parameter in layer.named_parameters():
            close(values[name].grad, parameter.grad, name, 1e-12)


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_a_sequence_without_frames_is_torchs_error(ours: Any, torchs: Any) -> None:
    for norm in (None, "sequence", "frame"):
        with pytest.raises(RuntimeError, match="larger than 0") as mine:
            ours(3, 2, norm=norm)(torch.zeros(0, 4, 3))
        with pytest.raises(mine.type, match="larger than 0"):
            torchs(3, 2)(torch.zeros(0, 4, 3))
