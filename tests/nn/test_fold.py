"""Layers without their norm: ``fold`` and ``normrnn.fold``, whole models, and what is refused."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_padded_sequence

import normrnn
from tests.helpers import CELLS, NORMS, STATISTICAL, Tagger, buffers, build, randomise, same

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
LENGTHS = [6, 2, 4]
FOLDABLE = [norm for norm in STATISTICAL if "time_steps" not in NORMS[norm]] + ["none"]
TORCHS: dict[str, Any] = {"tanh": nn.RNN, "relu": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
X: Any = {"dtype": torch.float64}


@pytest.mark.parametrize("options", [
    {"num_layers": 3, "bidirectional": True},
    {"num_layers": 2, "bias": False, "dtype": torch.float32},
    {"affine": False},
    {"proj_size": 1, "num_layers": 2, "bidirectional": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("norm", FOLDABLE)
@pytest.mark.parametrize("cell", CELLS)
def test_the_same_function(cell: str, norm: str, options: dict[str, Any]) -> None:
    """A layer of torch's, or ours where torch has none."""
    if "proj_size" in options and cell != "lstm":
        return
    layer = build(cell, norm, **options)
    if "-" in cell:
        for call in (layer.fold, lambda: normrnn.fold(layer)):
            with pytest.raises(ValueError, match="peephole"):
                call()
    if cell == "ligru":
        with pytest.raises(ValueError, match="LiGRU"):
            normrnn.fold(layer, plain=True)
    plain: Any = normrnn.fold(layer, plain=False if "-" in cell else None)
    assert plain.training
    assert type(plain) is TORCHS.get(cell, CELLS[cell][0])
    assert getattr(plain, "norm", None) is None
    assert getattr(plain, "peephole", None) == getattr(layer, "peephole", None)
    x, hx = torch.randn(6, 4, 3, **X), torch.randn(2, 6, 4, 2, **X)[:, : len(layer._suffixes)]
    hx, x = hx.to(layer.weight_hh_l0), x.to(layer.weight_hh_l0)
    start: Any = hx[0] if layer.mode != "LSTM" else (hx[0, ..., : layer.proj_size or 2], hx[1])
    tol = 1e-9 if x.dtype == torch.float64 else 1e-5
    same(plain.eval()(x, start), layer.eval()(x, start), tol)
    same(plain(x.repeat(9, 1, 1))[0], layer(x.repeat(9, 1, 1))[0], tol)
    packed = pack_padded_sequence(x, torch.tensor([2, 6, 3, 1]), enforce_sorted=False)
    same(plain(packed)[0].data, layer(packed)[0].data, tol)


def test_parameters_are_leaves_that_train() -> None:
    folded = build("lstm", "sequence").fold()
    folded(torch.randn(5, 4, 3, **X))[0].sum().backward()
    assert all(p.is_leaf and p.requires_grad and p.grad is not None for p in folded.parameters())


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


@pytest.mark.parametrize("norm", ["sequence", None])
def test_parametrized_weights_and_peepholes(norm: Any) -> None:
    layer: Any = normrnn.LSTM(3, 4, norm=norm, peephole="all")
    x = torch.randn(6, 5, 3)
    randomise(layer)
    names = "weight_ih_l0", "weight_hh_l0", "weight_ci_l0", "weight_co_l0"
    for name in names:
        parametrize.register_parametrization(layer, name, Half())
    layer.parametrizations["weight_co_l0"].original.requires_grad_(False)
    folded: Any = normrnn.fold(layer.eval(), plain=False)
    same(folded(x), layer(x), 1e-5)
    assert [name for name in names if not getattr(folded, name).requires_grad] == ["weight_co_l0"]


@pytest.mark.parametrize(
    ("cell", "options", "reason"),
    [
        ("lstm", {"norm": "hidden", "time_steps": 4}, "inside the recurrence"),
        ("lstm", {"norm": "frame", "time_steps": 4}, "differ over 4 time steps"),
        ("gru", {"norm": "recurrent", "time_steps": 3}, "3"),
        ("lstm", {"norm": "recurrent"}, "cell_norm=False"),
        ("lstm", {"norm": "layer"}, "every row by its own"),
        ("lstm", {"norm": None, "zoneout": (0.3, 0.6)}, r"zoneout=\(0.3, 0.6\)"),
        *(
            (cell, {"norm": norm, "track_running_stats": False}, "no running statistics")
            for cell, norm in (("gru", "hidden"), ("gru", "frame"), ("lstm", "sequence"))
        ),
    ],
)
def test_what_cannot_be_folded(cell: str, options: dict[str, Any], reason: str) -> None:
    make, own = CELLS[cell]
    layer = make(3, 2, **own, **options)
    with pytest.raises(ValueError, match=f"cannot be folded.*{reason}"):
        layer.fold()
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(3, 3), layer)})
    with pytest.raises(ValueError, match=rf"encoder\.1 cannot be folded.*{reason}"):
        normrnn.fold(model)
    if options.get("track_running_stats") is False:
        with pytest.raises(ValueError, match=reason):
            normrnn.Stream(layer)
        nn.utils.parametrizations.spectral_norm(layer, "weight_hh_l0")
        with pytest.raises(ValueError, match=reason):
            normrnn.fold(layer.eval())


def trained(norm: str = "sequence") -> tuple[Tagger, Tensor, Tensor]:
    model = Tagger(normrnn.LSTM(3, 4, **NORMS[norm]))
    x, resets = torch.randn(6, 3, 3), torch.rand(6, 3) < 0.3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x, LENGTHS, resets).square().mean().backward()
        optimizer.step()
    return model, x, resets


@pytest.mark.parametrize("norm", ["sequence", "frame", "hidden-shared", "none"])
def test_a_model_that_was_called_with_lengths(norm: str) -> None:
    """It keeps our layer without a norm; so does a deep copy that was never called itself."""
    model, x, resets = trained(norm)
    twin = copy.deepcopy(model.eval())
    for folded in (normrnn.fold(model), normrnn.fold(normrnn.fold(twin))):
        layer: Any = folded.lstm
        assert type(layer) is normrnn.LSTM
        assert layer.norm is None
        for lengths in (None, LENGTHS):
            for cut in (None, resets):
                same(folded(x, lengths, cut), model(x, lengths, cut), 1e-5)
        assert set(layer.state_dict()) == set(nn.LSTM(3, 4).state_dict())


def test_plain() -> None:
    model, x, _ = trained()
    with pytest.raises(ValueError, match=r"lstm cannot.*called with lengths= and resets=.*False"):
        normrnn.fold(model, plain=True)
    model.lstm.takes_lengths = model.lstm.takes_resets = False  # type: ignore[assignment]
    kinds = {True: nn.LSTM, None: nn.LSTM, False: normrnn.LSTM}
    for plain, kind in kinds.items():
        folded: Any = normrnn.fold(model, plain=plain).eval()
        assert type(folded.lstm) is kind
        same(folded(x), model.eval()(x), 1e-5)


@pytest.mark.parametrize("norm", ["sequence", "frame", "hidden"])
def test_statistics_that_were_never_updated(norm: Any) -> None:
    layer, x = normrnn.GRU(3, 2, norm=norm), torch.randn(5, 4, 3)
    with pytest.warns(UserWarning, match="GRU is folded with statistics.*never updated"):
        layer.fold()
    with pytest.warns(UserWarning, match=r"0 is folded.*never updated.*recalibrate"):
        normrnn.fold(nn.Sequential(layer))
    other = normrnn.recalibrate(copy.deepcopy(layer), [x])
    layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.fold()
        normrnn.fold(other)
        normrnn.GRU(3, 2, norm=None).fold()


def test_learned_states_are_kept() -> None:
    model = nn.Sequential(build("lstm", "sequence", learn_initial_state=True)).eval()
    x = torch.randn(5, 3, 3, **X)
    with pytest.warns(UserWarning, match="initial state"):
        plain: Any = normrnn.fold(model)
    assert type(plain[0]) is normrnn.LSTM
    assert plain[0].norm is None
    layer: Any = model[0]
    for folded in (plain, layer.fold()):
        same(folded(x)[0], model(x)[0], 1e-9)
    with pytest.raises(ValueError, match="initial states"):
        normrnn.fold(model, plain=True)


class SequenceWise(nn.Module):
    """(T, B, I) through a module that takes (N, I)."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.flatten(0, 1)).view(x.shape)


class BatchRNN(nn.Module):
    """DeepSpeech's form: BatchNorm1d over all frames, then a recurrent layer."""

    def __init__(self, rnn: Any, is_wrapped: bool, affine: bool):
        super().__init__()
        bn = nn.BatchNorm1d(rnn.input_size, affine=affine, **X)
        self.batch_norm = SequenceWise(bn) if is_wrapped else bn
        self.drop = nn.Dropout(0.5)
        self.rnn, self.is_wrapped = rnn, is_wrapped

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        rows = x if self.is_wrapped else x.flatten(0, 1)
        return self.rnn(self.drop(self.batch_norm(rows).view(x.shape)), **more)[0]


NO_PAIR = r"before=True found no BatchNorm1d.*neighbouring"
NORM = nn.BatchNorm1d(3)


class TestBefore:
    """``before=True``: a BatchNorm1d in front of a layer, with a norm of its own or none."""

    @pytest.mark.parametrize("is_wrapped", [True, False])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU, *CELLS])
    def test_the_same_function(self, kind: Any, bias: bool, is_wrapped: bool) -> None:
        how: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "bias": bias, **X}
        is_ours = isinstance(kind, str)
        lower = build(kind, "none", **how) if is_ours else kind(3, 2, **how)
        lower.weight_hh_l0.requires_grad_(False)
        upper = nn.LSTM(4, 2, **X) if is_ours else kind(4, 2, **how)
        model = nn.Sequential(
            BatchRNN(lower, is_wrapped, affine=bias), BatchRNN(upper, is_wrapped, affine=True)
        )
        randomise(model)
        before = copy.deepcopy(model.eval().state_dict())
        x = torch.randn(6, 3, 3, **X)
        more = {"lengths": torch.tensor(LENGTHS)} if is_ours else {}
        expected = model[1](model[0](x, **more))
        folded: Any = normrnn.fold(model, before=True)
        same(folded[1](folded[0](x, **more)), expected, 1e-9)
        assert not [m for m in folded.modules() if isinstance(m, nn.BatchNorm1d)]
        assert not folded[0].rnn.weight_hh_l0.requires_grad
        assert getattr(folded[0].rnn, "takes_lengths", False) == is_ours
        same(model.state_dict(), before)

    @pytest.mark.parametrize(
        ("modules", "reason"),
        [
            ([nn.Linear(3, 3), nn.LSTM(3, 2)], NO_PAIR),
            ([nn.BatchNorm1d(4), nn.LSTM(3, 2)], NO_PAIR),
            ([nn.BatchNorm1d(3), nn.Linear(3, 3), nn.LSTM(3, 2)], NO_PAIR),
            ([nn.LSTM(3, 3), nn.BatchNorm1d(3)], NO_PAIR),
            (
                [nn.Sequential(NORM, nn.LSTM(3, 3)), nn.Sequential(NORM, nn.Linear(3, 3))],
                "BatchNorm1d is used in more than one place",
            ),
            (
                [nn.BatchNorm1d(3, track_running_stats=False), nn.LSTM(3, 2)],
                "without running statistics",
            ),
        ],
    )
    def test_what_is_refused(self, modules: list[nn.Module], reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            normrnn.fold(nn.Sequential(*modules), before=True)


CHANGES: dict[str, Any] = {
    "data": lambda p: p.data.mul_(1.5),
    "copy": lambda p: p.copy_(p * 1.5),
    "set": lambda p: p.set_(p.clone() * 1.5),
    "numpy": lambda p: p.numpy().__imul__(1.5),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("rows", [2, 20, 200])
@pytest.mark.parametrize("norm", ["sequence", "frame", "hidden-shared", "whiten"])
@torch.no_grad()
def test_a_call_at_test_time_sees_every_change(norm: Any, rows: int, how: str) -> None:
    """Nothing of an earlier call is remembered."""
    for dtype in (torch.float32, torch.float64):
        layer = build("lstm", norm, dtype=dtype).eval()
        x = torch.randn(rows, 4, 3, dtype=dtype)
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            if tensor.is_floating_point():
                old = layer(x)[0]
                CHANGES[how](tensor.detach() if how == "numpy" else tensor)
                new = layer(x)[0]
                assert not torch.equal(old, new), name
                fresh = build("lstm", norm, dtype=dtype).eval()
                fresh.load_state_dict(layer.state_dict())
                assert torch.equal(fresh(x)[0], new), name


def test_calls_of_compiled_and_traced_models_count() -> None:
    model = Tagger(normrnn.LSTM(3, 4, norm="sequence"))
    x, lengths = torch.randn(6, 3, 3), torch.tensor(LENGTHS)
    torch.compile(model, backend="eager", fullgraph=True)(x, lengths).sum().backward()
    folded: Any = normrnn.fold(model.eval())
    same(folded(x, lengths), model(x, lengths), 1e-5)
    layer = normrnn.LSTM(3, 4, norm="sequence")
    traced: Any = torch.fx.symbolic_trace(nn.Sequential(nn.Tanh(), layer))
    traced(x)
    folded = normrnn.fold(traced.eval())
    assert type(folded.get_submodule("1")) is nn.LSTM
    same(folded(x)[0], traced(x)[0], 1e-5)


@pytest.mark.parametrize("options", [{}, {"proj_size": 4}, {"norm": "whiten"}, X], ids=str)
def test_training_between_an_eval_pass_and_its_backward_pass(options: dict[str, Any]) -> None:
    """Gradients are those of the statistics that the pass saw."""
    found = []
    for is_disturbed in (False, True):
        torch.manual_seed(0)
        layer = normrnn.LSTM(5, 8, **{"norm": "sequence", **options})
        x = (torch.randn(10, 6, 5) * 2 + 1).to(layer.weight_hh_l0.dtype)
        layer(x)
        output = layer.eval()(x)[0]
        if is_disturbed:
            before = buffers(layer)
            layer.train()(x * 5 + 7)
            assert any(not torch.equal(v, before[n]) for n, v in layer.named_buffers())
        output.square().sum().backward()
        found.append({name: p.grad for name, p in layer.named_parameters()})
    same(*found)
