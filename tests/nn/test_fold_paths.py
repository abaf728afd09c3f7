"""Whole ways of a user: train, fold, call as before, save, load elsewhere."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normrnn
from tests.helpers import NORMS, build, randomise

LENGTHS = [6, 2, 4]


class Ragged(nn.Module):
    """A tagger as people write it: ``forward`` hands ``lengths`` to its layer."""

    def __init__(self, lstm: nn.Module):
        super().__init__()
        self.lstm, self.head = lstm, nn.Linear(4, 3)

    def forward(self, x: Tensor, lengths: Any = None, resets: Any = None) -> Tensor:
        more = {"lengths": lengths, "resets": resets}
        more = {name: value for name, value in more.items() if value is not None}
        return self.head(self.lstm(x, **more)[0])


def trained(norm: Any = "sequence", **options: Any) -> tuple[Ragged, Tensor, Tensor]:
    model = Ragged(normrnn.LSTM(3, 4, **{**NORMS[norm], **options}))
    x, resets = torch.randn(6, 3, 3), torch.rand(6, 3) < 0.3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x, LENGTHS, resets).square().mean().backward()
        optimizer.step()
    return model, x, resets


@pytest.mark.parametrize("norm", ["sequence", "frame", "hidden-shared", "none"])
def test_train_ragged_fold_call(norm: Any) -> None:
    model, x, resets = trained(norm)
    model.eval()
    folded: Any = normrnn.fold(model)
    assert type(folded.lstm) is normrnn.LSTM
    assert folded.lstm.norm is None
    for more in ({"lengths": LENGTHS}, {"resets": resets}, {"lengths": LENGTHS, "resets": resets}):
        torch.testing.assert_close(folded(x, **more), model(x, **more), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)
    assert set(folded.lstm.state_dict()) == set(nn.LSTM(3, 4).state_dict())


def test_a_copy_of_the_model_still_knows() -> None:
    """As averaged weights are: a deep copy that was never called itself."""
    model, x, _ = trained()
    twin = copy.deepcopy(model).eval()
    folded = normrnn.fold(normrnn.fold(twin))
    torch.testing.assert_close(folded(x, LENGTHS), twin(x, LENGTHS), rtol=1e-5, atol=1e-5)


def test_plain_true_insists_and_says_why_not() -> None:
    model, x, _ = trained()
    with pytest.raises(ValueError, match=r"lstm cannot.*called with lengths= and resets=.*False"):
        normrnn.fold(model, plain=True)
    model.lstm.takes_lengths = model.lstm.takes_resets = False  # type: ignore[assignment]
    assert type(normrnn.fold(model, plain=True).lstm) is nn.LSTM
    assert type(normrnn.fold(model).lstm) is nn.LSTM
    kept: Any = normrnn.fold(model, plain=False).eval()
    assert type(kept.lstm) is normrnn.LSTM
    torch.testing.assert_close(kept(x), model.eval()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cell", ["lstm-output", "lstm-all"])
@pytest.mark.parametrize("norm", ["sequence", "frame", "none"])
def test_peepholes_are_kept_where_ours_is(cell: str, norm: Any) -> None:
    layer = build(cell, norm, num_layers=2, bidirectional=True).eval()
    with pytest.raises(ValueError, match="no peepholes"):
        normrnn.fold(layer)
    folded: Any = normrnn.fold(layer, plain=False)
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    assert (folded.norm, folded.peephole) == (None, layer.peephole)
    torch.testing.assert_close(folded(x), layer(x), rtol=1e-9, atol=1e-9)


class TestNeverUpdated:
    @pytest.mark.parametrize("norm", ["sequence", "frame", "hidden"])
    def test_says_so(self, norm: Any) -> None:
        layer = normrnn.GRU(3, 2, norm=norm)
        with pytest.warns(UserWarning, match="GRU is folded with statistics.*never updated"):
            layer.fold()
        with pytest.warns(UserWarning, match=r"0 is folded.*never updated.*recalibrate"):
            normrnn.fold(nn.Sequential(layer))

    @pytest.mark.parametrize("norm", ["sequence", "frame", "hidden"])
    def test_not_after_training_or_recalibration(self, norm: Any) -> None:
        layer = normrnn.GRU(3, 2, norm=norm)
        layer(torch.randn(5, 4, 3))
        other = normrnn.recalibrate(normrnn.GRU(3, 2, norm=norm), [torch.randn(5, 4, 3)])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer.fold()
            normrnn.fold(other)
            normrnn.GRU(3, 2, norm=None).fold()


class TestShared:
    """``recalibrate(..., shared=True)``: statistics per step become one."""

    @pytest.mark.parametrize("bidirectional", [False, True])
    @pytest.mark.parametrize("norm", ["frame-slots", "hidden"])
    @pytest.mark.parametrize("cell", ["tanh", "lstm", "gru"])
    def test_equals_a_layer_that_never_had_slots(
        self, cell: str, norm: Any, bidirectional: bool
    ) -> None:
        layer = build(cell, norm, num_layers=2, bidirectional=bidirectional)
        other = {"frame-slots": "frame", "hidden": "hidden-shared"}[norm]
        twin = build(cell, other, num_layers=2, bidirectional=bidirectional)
        twin.load_state_dict(dict(layer.named_parameters()), strict=False)
        batches = [torch.randn(5, 4, 3, dtype=torch.float64) * k for k in (1, 3)]
        # No lone rows: those are normalised with running statistics, which differ.
        ragged = {"input": torch.randn(6, 3, 3, dtype=torch.float64), "lengths": [6, 3, 6]}
        normrnn.recalibrate(layer, [*batches, ragged], shared=True)
        normrnn.recalibrate(twin, [*batches, ragged])
        assert layer.time_steps is None
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(layer.state_dict()[name], value, rtol=1e-9, atol=1e-9)
        x = torch.randn(7, 2, 3, dtype=torch.float64)
        torch.testing.assert_close(layer.eval()(x), twin.eval()(x), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(layer.fold()(x), layer(x), rtol=1e-9, atol=1e-9)
        layer.train()(x)  # and trains on, with shared statistics
        assert layer.norm_l0.num_batches_tracked.item() == 4

    def test_the_first_layer_by_hand(self) -> None:
        layer = build("lstm", "frame-slots")
        x = torch.randn(8, 5, 3, dtype=torch.float64)  # eight steps, three slots
        normrnn.recalibrate(layer, x.split(4), shared=True)
        pre = x.flatten(0, 1) @ layer.weight_ih_l0.detach().t()
        torch.testing.assert_close(layer.norm_l0.running_mean, pre.mean(0))
        torch.testing.assert_close(layer.norm_l0.running_var, pre.var(0))

    def test_what_no_batch_reached_keeps_its_slots(self) -> None:
        model = nn.ModuleList([build("gru", "frame-slots"), build("gru", "hidden")])

        def first(m: Any, x: Tensor) -> None:
            m[0](x)

        x = torch.randn(5, 4, 3, dtype=torch.float64)
        normrnn.recalibrate(model, [x], step=first, shared=True)
        assert [layer.time_steps for layer in model] == [None, 3]
        assert model[1].norm_l0.running_mean.shape == (3, 6)  # type: ignore[union-attr]

    def test_others_are_recalibrated_as_ever(self) -> None:
        layer, twin = build("gru", "sequence"), build("gru", "sequence")
        twin.load_state_dict(layer.state_dict())
        x = torch.randn(5, 4, 3, dtype=torch.float64)
        normrnn.recalibrate(layer, [x], shared=True)
        normrnn.recalibrate(twin, [x])
        assert all(torch.equal(v, layer.state_dict()[k]) for k, v in twin.state_dict().items())


class SequenceWise(nn.Module):
    """(T, B, I) through a module that takes (N, I)."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.flatten(0, 1)).view(x.shape)


class BatchRNN(nn.Module):
    """DeepSpeech's form: BatchNorm1d over all frames, then a recurrent layer."""

    def __init__(self, rnn: Any, wrapped: bool = True):
        super().__init__()
        bn = nn.BatchNorm1d(rnn.input_size, dtype=rnn.weight_ih_l0.dtype)
        self.batch_norm = SequenceWise(bn) if wrapped else bn
        self.drop = nn.Dropout(0.5)
        self.rnn, self.wrapped = rnn, wrapped

    def forward(self, x: Tensor) -> Tensor:
        if not self.wrapped:
            x = self.batch_norm(x.flatten(0, 1)).view(x.shape)
        else:
            x = self.batch_norm(x)
        return self.rnn(self.drop(x))[0]


NO_PAIR = r"before=True found no BatchNorm1d.*neighbouring"
NORM = nn.BatchNorm1d(3)


class TestBefore:
    @pytest.mark.parametrize("wrapped", [True, False])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU, normrnn.LSTM, normrnn.GRU])
    def test_the_same_eval_outputs(self, kind: Any, bias: bool, wrapped: bool) -> None:
        how: dict[str, Any] = {"bidirectional": True, "bias": bias, "dtype": torch.float64}
        stack = [BatchRNN(kind(3, 2, 2, **how), wrapped), BatchRNN(kind(4, 2, **how), wrapped)]
        model = nn.Sequential(*stack)
        randomise(model)
        model.eval()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        x = torch.randn(7, 3, 3, dtype=torch.float64)
        folded: Any = normrnn.fold(model, before=True)
        torch.testing.assert_close(folded(x), model(x), rtol=1e-9, atol=1e-9)
        assert not [m for m in folded.modules() if isinstance(m, nn.BatchNorm1d)]
        assert all(type(m).__module__ != "normrnn.nn.layers" for m in folded.modules())
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    @pytest.mark.parametrize("affine", [True, False])
    def test_in_a_sequential(self, affine: bool) -> None:
        model = nn.Sequential(SequenceWise(nn.BatchNorm1d(3, affine=affine)), nn.LSTM(3, 2))
        randomise(model)
        x = torch.randn(5, 4, 3)
        folded = normrnn.fold(model.eval(), before=True)
        torch.testing.assert_close(folded(x)[0], model(x)[0], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        ("model", "reason"),
        [
            (nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 2)), NO_PAIR),
            (nn.Sequential(nn.BatchNorm1d(4), nn.LSTM(3, 2)), NO_PAIR),
            (nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.LSTM(3, 2)), NO_PAIR),
            (nn.Sequential(nn.LSTM(3, 3), nn.BatchNorm1d(3)), NO_PAIR),
            (
                nn.ModuleList(
                    [nn.Sequential(NORM, nn.LSTM(3, 3)), nn.Sequential(NORM, nn.Linear(3, 3))]
                ),
                "BatchNorm1d is used in more than one place",
            ),
            (
                nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.LSTM(3, 2)),
                "without running statistics",
            ),
        ],
    )
    def test_what_is_refused(self, model: nn.Module, reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            normrnn.fold(model, before=True)


CHANGES: dict[str, Any] = {
    "data": lambda p: p.data.mul_(1.5),
    "copy": lambda p: p.copy_(p * 1.5),
    "set": lambda p: p.set_(p.clone() * 1.5),
    "numpy": lambda p: p.numpy().__imul__(1.5),
}


class TestEvalCalls:
    """Nothing of a call is remembered that a change of the layer could make wrong."""

    @pytest.mark.parametrize("how", CHANGES)
    @pytest.mark.parametrize("rows", [2, 20, 200])
    @pytest.mark.parametrize("norm", ["sequence", "frame", "hidden-shared"])
    def test_changes_by_any_way_are_seen(self, norm: Any, rows: int, how: str) -> None:
        for dtype in (torch.float32, torch.float64):
            layer = build("lstm", norm, dtype=dtype).eval()
            x = torch.randn(rows, 4, 3, dtype=dtype)
            with torch.no_grad():
                for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
                    if tensor.is_floating_point():
                        old = layer(x)[0]
                        CHANGES[how](tensor.detach() if how == "numpy" else tensor)
                        new = layer(x)[0]
                        assert not torch.equal(old, new), name
                        fresh = build("lstm", norm, dtype=dtype).eval()
                        fresh.load_state_dict(layer.state_dict())
                        assert torch.equal(fresh(x)[0], new), name


def test_what_a_compiled_model_was_called_with_counts_too() -> None:
    model = Ragged(normrnn.LSTM(3, 4, norm="sequence"))
    x, lengths = torch.randn(6, 3, 3), torch.tensor(LENGTHS)
    torch.compile(model, backend="eager", fullgraph=True)(x, lengths).sum().backward()
    folded = normrnn.fold(model.eval())
    torch.testing.assert_close(folded(x, lengths), model(x, lengths), rtol=1e-5, atol=1e-5)


def test_a_node_of_fx_folds_as_it_was_called() -> None:
    traced: Any = torch.fx.symbolic_trace(
        nn.Sequential(nn.Tanh(), normrnn.LSTM(3, 4, norm="sequence"))
    )
    x = torch.randn(6, 3, 3)
    traced(x)
    folded: Any = normrnn.fold(traced.eval())
    assert type(folded.get_submodule("1")) is nn.LSTM
    torch.testing.assert_close(folded(x)[0], traced(x)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"proj_size": 4}, {"dtype": torch.float64}])
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_training_between_a_pass_at_test_time_and_its_way_back(options: dict[str, Any]) -> None:
    """Gradients are those of the statistics that the pass saw."""
    found = []
    for disturbed in (False, True):
        torch.manual_seed(0)
        layer = normrnn.LSTM(5, 8, norm="sequence", **options)
        x = (torch.randn(10, 6, 5) * 2 + 1).to(layer.weight_hh_l0.dtype)
        layer(x)
        output = layer.eval()(x)[0]
        if disturbed:
            layer.train()(x * 5 + 7)
        output.square().sum().backward()
        found.append({name: p.grad for name, p in layer.named_parameters()})
    torch.testing.assert_close(*found, rtol=0, atol=0)
