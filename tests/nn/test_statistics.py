"""Statistics in the layers: what is normalised, what is remembered, what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import normrnn
from normrnn import norms
from tests.helpers import (
    CELLS,
    INPUT,
    NORMS,
    STATISTICAL,
    build,
    check_against_reference,
    close,
)

BY_STEP = [n for n in STATISTICAL if norms.get(NORMS[n]["norm"]).pools == "step"]


def gate_free(norm: str, **options: Any) -> Any:
    """relu(BN(x)) for norms of the input, relu(BN(x)) for hidden too: no recurrence, W_x = 1."""
    options = {**NORMS[norm], **options}
    layer: Any = normrnn.RNN(1, 1, nonlinearity="relu", dtype=torch.float64, **options)
    with torch.no_grad():
        layer.weight_ih_l0.fill_(1)
        layer.weight_hh_l0.zero_()
    return layer


def column(*steps: list[float]) -> Tensor:
    return torch.tensor(steps, dtype=torch.float64).unsqueeze(2)


def buffers(layer: Any) -> list[Any]:
    n = layer.norm_l0
    return [n.running_mean.flatten().tolist(), n.running_var.flatten().tolist()]


def snapshot(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def unchanged(model: torch.nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(b, before[name]) for name, b in model.named_buffers())


class TestByHand:
    """Frames (1, 3), (2, 6), (5): mean 3.4, biased variance 3.44, unbiased 4.3."""

    x = column([1, 3], [2, 6], [5, 999])
    lengths = (3, 2)

    @pytest.mark.parametrize("norm", ["sequence", "frame"])
    def test_shared_buffers(self, norm: str) -> None:
        layer = gate_free(norm)
        layer(self.x, lengths=self.lengths)
        assert buffers(layer) == [[pytest.approx(0.34)], [pytest.approx(0.9 + 0.43)]]
        layer(self.x, lengths=self.lengths)
        assert buffers(layer) == [[pytest.approx(0.646)], [pytest.approx(0.9 * 1.33 + 0.43)]]
        assert layer.norm_l0.num_batches_tracked.item() == 2

    @pytest.mark.parametrize("norm", ["sequence", "frame"])
    def test_cumulative(self, norm: str) -> None:
        layer = gate_free(norm, momentum=None)
        layer(self.x, lengths=self.lengths)
        assert buffers(layer) == [[pytest.approx(3.4)], [pytest.approx(4.3)]]
        layer(column([0, 2]))  # mean 1, unbiased variance 2; batches count alike
        assert buffers(layer) == [[pytest.approx(2.2)], [pytest.approx(3.15)]]

    @pytest.mark.parametrize("norm", ["frame-slots", "hidden"])
    def test_slots(self, norm: str) -> None:
        layer = gate_free(norm)  # K = 3
        layer(self.x, lengths=self.lengths)
        assert buffers(layer) == [
            pytest.approx([0.2, 0.4, 0]),
            pytest.approx([0.9 + 0.2, 0.9 + 0.8, 1]),
        ]
        assert layer.norm_l0.num_batches_tracked.tolist() == [1, 1, 0]

    @pytest.mark.parametrize("norm", ["frame-slots", "hidden"])
    def test_steps_beyond_the_slots(self, norm: str) -> None:
        """In training they are normalised by the batch and update nothing."""
        layer = gate_free(norm, eps=1e-12)
        out, _ = layer(column([1, 3], [1, 3], [1, 3], [50, 70], [-9, -5]))
        assert out[:, 1, 0].tolist() == pytest.approx([1] * 5)
        assert layer.norm_l0.num_batches_tracked.tolist() == [1, 1, 1]
        assert buffers(layer)[0] == pytest.approx([0.2, 0.2, 0.2])

    @pytest.mark.parametrize("norm", ["frame-slots", "hidden"])
    def test_the_slot_of_test_time(self, norm: str) -> None:
        """The last slot ≤ min(t, K−1) that has ever been updated, else the first one that has."""
        layer = gate_free(norm, eps=1e-12).eval()
        layer.norm_l0.running_mean.copy_(torch.tensor([[1.0], [2.0], [3.0]]))
        for tracked, means in (
            ([1, 0, 1], [1, 1, 3, 3, 3]),
            ([1, 1, 0], [1, 2, 2, 2, 2]),
            ([0, 1, 0], [2, 2, 2, 2, 2]),
            ([5, 0, 0], [1, 1, 1, 1, 1]),
        ):
            layer.norm_l0.num_batches_tracked.copy_(torch.tensor(tracked))
            out, _ = layer(column(*[[10.0]] * 5))
            assert out.flatten().tolist() == pytest.approx([10 - m for m in means])

    def test_reverse_slots_belong_to_the_frame_itself(self) -> None:
        """Not to the distance from the end: lengths differ, slot 0 is frame 0 of everyone."""
        layer = gate_free("frame-slots", bidirectional=True)
        with torch.no_grad():
            layer.weight_ih_l0_reverse.fill_(1)
        layer(column([1, 3, 5], [20, 40, 999], [100, 300, 999]), lengths=[3, 3, 1])
        for normaliser in layer.normalisers():
            assert normaliser.running_mean.flatten().tolist() == pytest.approx([0.3, 3, 20])

    def test_lone_rows_use_running_statistics_from_before(self) -> None:
        """They update nothing of their own step, and the batch does not change them first."""
        layer = gate_free("frame", eps=1e-12, momentum=1.0)
        layer.norm_l0.running_mean.fill_(2)
        layer.norm_l0.running_var.fill_(4)
        out, _ = layer(column([1, 3], [8, 999]), lengths=[2, 1])
        assert out[1, 0].item() == pytest.approx((8 - 2) / 2)
        layer = gate_free("frame-slots", momentum=1.0)
        layer(column([1, 3], [8, 999]), lengths=[2, 1])
        assert layer.norm_l0.num_batches_tracked.tolist() == [1, 0, 0]
        assert layer.norm_l0.running_mean.flatten().tolist() == [2, 0, 0]


@pytest.mark.parametrize("norm", ["sequence", "frame"])
def test_gates_come_out_with_mean_0_and_variance_1(norm: str) -> None:
    """relu(BN(x)) and relu(−BN(x)) together show the normalised rows."""
    layer: Any = CELLS["relu"][0](
        1, 2, nonlinearity="relu", norm=norm, eps=1e-12, dtype=torch.float64
    )
    with torch.no_grad():
        layer.weight_ih_l0.copy_(torch.tensor([[1.0], [-1.0]]))
        layer.weight_hh_l0.zero_()
    x = torch.randn(5, 7, 1, dtype=torch.float64) * 3 + 2
    out, _ = layer(x)
    rows = out[..., 0] - out[..., 1]
    dims = (0, 1) if norm == "sequence" else (1,)
    assert rows.mean(dims).abs().max() < 1e-10
    assert (rows.var(dims, correction=0) - 1).abs().max() < 1e-10


@pytest.mark.parametrize("norm", STATISTICAL)
@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 1e30, 0.0])
def test_padding_is_never_looked_at(norm: str, fill: float) -> None:
    """Whatever it holds, nothing changes, statistics included."""
    layers = [build("lstm", norm, num_layers=2, bidirectional=True)]
    layers.append(build("lstm", norm, num_layers=2, bidirectional=True))
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(6, 3, 3, dtype=torch.float64)
    poisoned = x.clone()
    for b, n in enumerate((2, 5, 3)):
        poisoned[n:, b] = fill
    outputs = []
    for layer, given in zip(layers, (x, poisoned), strict=True):
        leaf = given.requires_grad_()
        out, _ = layer(leaf, lengths=[2, 5, 3])
        out.square().sum().backward()
        outputs.append((out, leaf.grad))
    assert torch.equal(outputs[0][0], outputs[1][0])
    torch.testing.assert_close(outputs[0][1], outputs[1][1], rtol=0, atol=0)
    for a, b in zip(layers[0].state_dict().values(), layers[1].state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("norm", STATISTICAL)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("t", [0, 2, 4])
def test_a_broken_batch_leaves_all_buffers_alone(norm: str, bad: float, t: int) -> None:
    """At a used slot, past the last slot, or in the lone tail."""
    layer = build("gru", norm, num_layers=2, bidirectional=True)
    before = snapshot(layer)
    x = torch.randn(5, 3, 3, dtype=torch.float64)
    x[t, 1, 0] = bad
    layer(x, lengths=[3, 5, 4])
    if t < 4 or bad != bad:
        assert unchanged(layer, before)
    else:  # a gate of ±∞ saturates: the layer above sees sound numbers
        first = {k: v for k, v in before.items() if k.startswith("norm_l0")}
        assert all(torch.equal(dict(layer.named_buffers())[k], v) for k, v in first.items())
    layer(torch.randn(5, 3, 3, dtype=torch.float64))
    assert not unchanged(layer, before)
    assert all(bool(b.isfinite().all()) for b in layer.buffers())


@pytest.mark.parametrize("norm", STATISTICAL)
def test_constant_input_has_finite_gradients(norm: str) -> None:
    """Variance 0."""
    layer = build("lstm", norm, num_layers=2)
    x = torch.full((4, 3, 3), 0.7, dtype=torch.float64).requires_grad_()
    out, _ = layer(x)
    out.square().sum().backward()
    assert bool(out.isfinite().all())
    for tensor in (x, *layer.parameters()):
        assert tensor.grad is not None
        assert bool(tensor.grad.isfinite().all())


BY_STEP = ["frame", "frame-slots", "recurrent", "recurrent-shared"]


class TestConstantSteps:
    """Frame-wise statistics where all rows of W_x x at a step are equal, as at a start token."""

    @pytest.mark.parametrize("cell", ["lstm", "gru"])
    @pytest.mark.parametrize("norm", [*BY_STEP, "hidden", "sequence"])
    @pytest.mark.parametrize("with_state", [True, False])
    def test_as_the_reference(self, cell: str, norm: str, with_state: bool) -> None:
        """Ragged, with a single row at the end and NaN in the padding."""
        layer = build(cell, norm, num_layers=2, bidirectional=True)
        for constant in ([0], [2, 3], [0, 1, 2, 3, 4, 5])[: 2 + with_state]:
            check_against_reference(
                layer, [3, 6, 5], "padded", with_state=with_state, constant=constant
            )

    @pytest.mark.parametrize("norm", BY_STEP)
    @pytest.mark.parametrize("momentum", [0.1, None])
    def test_from_the_beginning(self, norm: str, momentum: float | None) -> None:
        """Nothing tracked yet, then some slots."""
        layer = build("gru", norm, bidirectional=True, momentum=momentum)
        for n in layer.normalisers():
            n.reset_running_stats()
        for _ in range(2):
            check_against_reference(layer, [4, 4, 3], "padded", constant=[0])
        check_against_reference(layer.eval(), [4, 4, 3], "padded", constant=[0])
        check_against_reference(layer.train(), [4, 4, 4], "dense", constant=[1])

    @pytest.mark.parametrize("norm", ["frame", "frame-slots"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_nothing_is_updated(self, norm: str, dtype: torch.dtype) -> None:
        layer = build("lstm", norm, dtype=dtype)
        before = [b.clone() for b in layer.buffers()]
        layer(torch.randn(4, 1, 3, dtype=dtype).expand(4, 5, 3))
        assert all(map(torch.equal, layer.buffers(), before))
        normrnn.recalibrate(layer, [torch.randn(4, 1, 3, dtype=dtype).expand(4, 5, 3)])
        assert all(map(torch.equal, layer.buffers(), before))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_slots_that_were_never_updated(self, dtype: torch.dtype) -> None:
        """Step 0 has those of step 1, in training and in eval mode."""
        layer: Any = normrnn.GRU(3, 4, norm="frame", time_steps=4, dtype=dtype)
        x = torch.randn(4, 6, 3, dtype=dtype)
        x[0] = x[0, :1]
        for _ in range(3):
            layer(x)
        norm = layer.norm_l0
        assert norm.num_batches_tracked.tolist() == [0, 3, 3, 3]
        mean, var = norm.test_statistics(4)
        assert torch.equal(mean[0], norm.running_mean[1])
        assert torch.equal(var[0], norm.running_var[1])
        with normrnn.batch_statistics(layer):
            own = layer(x)[0][0]
        torch.testing.assert_close(own, layer.eval()(x)[0][0])

    def test_recurrent_statistics_of_a_zero_state_are_the_batch_s(self) -> None:
        """W_h h has variance 0 at step 0 of every call, and stays normalised and counted so."""
        layer: Any = normrnn.LSTM(3, 4, norm="recurrent", time_steps=3)
        x = torch.randn(3, 5, 3)
        x[0] = x[0, :1]
        layer(x)
        norm = layer.norm_l0
        assert norm.num_batches_tracked.tolist() == [1, 1, 1]
        torch.testing.assert_close(norm.running_var_hh[0], torch.full((16,), 0.9))
        assert torch.equal(norm.running_var[0], torch.ones(16))
        assert torch.equal(norm.test_statistics(3)[1][0, :16], norm.running_var[1])

    @pytest.mark.parametrize("time_steps", [None, 7])
    def test_eval_agrees_with_training(self, time_steps: int | None) -> None:
        """A decoder with teacher forcing whose sequences share their first token."""
        torch.manual_seed(0)
        tokens = torch.randint(6, (7, 32))
        inputs = torch.cat([torch.full((1, 32), 6), tokens[:-1]])
        gru = normrnn.GRU(8, 32, norm="frame", time_steps=time_steps)
        tables: Any = torch.nn.ModuleList([torch.nn.Embedding(7, 8), torch.nn.Embedding(32, 32)])
        head = torch.nn.Linear(32, 6)
        model = torch.nn.ModuleList([gru, tables, head])
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)

        def loss_of() -> Tensor:
            output, _ = gru(tables[0](inputs), tables[1](torch.arange(32))[None])
            return torch.nn.functional.cross_entropy(head(output).flatten(0, 1), tokens.flatten())

        for _ in range(150):
            optimizer.zero_grad()
            loss_of().backward()
            optimizer.step()
        with torch.no_grad():
            trained, running = loss_of(), (model.eval(), loss_of())[1]
            normrnn.recalibrate(model, [None], step=lambda *_: loss_of())
            recalibrated = loss_of()
        assert trained < 0.1
        assert running < 0.15
        assert recalibrated < 0.15


@pytest.mark.parametrize("form", ["dense", "unbatched", "packed", "padded"])
class TestTooFewRows:
    def give(self, layer: Any, T: int, form: str) -> Tensor:
        """Rows of output, (T, D·H)."""
        x = torch.linspace(-1, 1, T * 3, dtype=torch.float64).view(T, 1, 3)
        if form == "dense":
            return layer(x)[0][:, 0]
        if form == "unbatched":
            return layer(x[:, 0])[0]
        if form == "packed":
            return layer(torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([T])))[0].data
        return layer(torch.cat([x, x]), lengths=[T])[0][:T, 0]

    @pytest.mark.parametrize("norm", STATISTICAL)
    @pytest.mark.parametrize("cell", ["tanh", "lstm", "gru"])
    def test_running_statistics_serve_and_stay(self, cell: str, norm: str, form: str) -> None:
        """A last batch of one must not end a training run: a word, once, and on it goes."""
        layer = build(cell, norm, num_layers=2, bidirectional=True)
        before = snapshot(layer)
        with pytest.warns(UserWarning, match="single row per time step.*running ones") as said:
            first = self.give(layer, 1, form)
        assert len(said) == 1
        self.give(layer, 1, form)  # says nothing: warnings are errors here
        assert unchanged(layer, before)
        close(first, self.give(layer.eval(), 1, form), "output", 1e-12)
        first.square().sum().backward()
        assert all(p.grad is not None for p in layer.parameters())

    @pytest.mark.parametrize("norm", BY_STEP)
    def test_every_slice_a_single_row(self, norm: str, form: str) -> None:
        layer = build("lstm", norm)
        before = snapshot(layer)
        with pytest.warns(UserWarning, match="single row"):
            first = self.give(layer, 4, form)
        assert unchanged(layer, before)
        close(first, self.give(layer.eval(), 4, form), "output", 1e-12)

    @pytest.mark.parametrize("never", ["tracked", "updated"])
    @pytest.mark.parametrize("norm", STATISTICAL)
    def test_without_statistics_there_is_nothing_to_use(
        self, norm: str, never: str, form: str
    ) -> None:
        layer = build("lstm", norm, track_running_stats=never == "updated")
        for name, buffer in layer.named_buffers():
            if name.endswith("tracked"):
                buffer.zero_()
        before = snapshot(layer)
        wrong = r"more than one row.*got 1.*ever tracked.*'layer'|more rows than features, got 1"
        with pytest.raises(ValueError, match=wrong):
            self.give(layer, 1, form)
        assert unchanged(layer, before)

    @pytest.mark.parametrize("norm", ["sequence", "frame", "hidden"])
    def test_asked_for_batch_statistics_too(self, norm: str, form: str) -> None:
        layer = build("lstm", norm)
        with normrnn.batch_statistics(layer), pytest.warns(UserWarning, match="single row"):
            found = self.give(layer, 1, form)
        close(found, self.give(layer.eval(), 1, form), "output", 1e-12)


@pytest.mark.parametrize("norm", ["frame", "hidden"])
def test_a_lone_tail_without_running_statistics(norm: str) -> None:
    layer = build("lstm", norm, track_running_stats=False)
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    layer(x)
    with pytest.raises(ValueError, match=r"single row.*track_running_stats=True"):
        layer(x, lengths=[4, 2])


class TestBatchStatistics:
    @pytest.mark.parametrize("norm", STATISTICAL)
    def test_nothing_is_updated_and_modes_come_back(self, norm: str) -> None:
        layer = build("lstm", norm, num_layers=2, dropout=0.5)
        model = torch.nn.Sequential(layer, torch.nn.Dropout(0.5).eval())
        before = snapshot(model)
        x = torch.randn(4, 3, 3, dtype=torch.float64)
        with normrnn.batch_statistics(model) as given:
            assert given is model
            assert not any(m.training for m in model.modules())
            assert torch.equal(layer(x)[0], layer(x)[0])  # dropout is off
        assert unchanged(model, before)
        assert layer.training
        assert layer.norm_l0.training
        assert not model[1].training
        layer(x)
        assert not unchanged(model, before)

    @pytest.mark.parametrize("norm", STATISTICAL)
    def test_the_batch_is_what_counts(self, norm: str) -> None:
        layer = build("gru", norm, num_layers=2).eval()
        x = torch.randn(4, 3, 3, dtype=torch.float64)
        at_test_time = layer(x)[0]
        with normrnn.batch_statistics(layer):
            by_batch = layer(x)[0]
        assert not torch.isclose(at_test_time, by_batch).all()
        layer.train()
        assert torch.equal(layer(x)[0], by_batch)

    def test_restored_after_an_exception_and_when_nested(self) -> None:
        layer = build("gru", "sequence").train()
        x = torch.randn(4, 3, 3, dtype=torch.float64)
        with pytest.raises(KeyError), normrnn.batch_statistics(layer):
            raise KeyError
        assert layer.training
        layer.eval()
        plain = layer(x)[0]
        with normrnn.batch_statistics(layer):
            wanted = layer(x)[0]
            with normrnn.batch_statistics(layer):
                assert torch.equal(layer(x)[0], wanted)
            assert torch.equal(layer(x)[0], wanted)
        assert torch.equal(layer(x)[0], plain)

    def test_sequence_wise_statistics_see_the_future(self) -> None:
        """With batch statistics an output depends on later frames; else it does not."""
        x = torch.randn(4, 3, 3, dtype=torch.float64)
        later = x.clone()
        later[3] += 1
        for norm, sees in (("sequence", True), ("frame", False), ("hidden", False)):
            layer = build("lstm", norm)
            with normrnn.batch_statistics(layer):
                same = torch.equal(layer(x)[0][:3], layer(later)[0][:3])
            assert same is not sees
            layer.eval()
            assert torch.equal(layer(x)[0][:3], layer(later)[0][:3])


def test_training_under_no_grad_updates_too() -> None:
    layer = build("lstm", "sequence")
    before = snapshot(layer)
    with torch.no_grad():
        layer(torch.randn(4, 3, 3, dtype=torch.float64))
    assert not unchanged(layer, before)


def test_dropout_biases_the_running_variance() -> None:
    """At p = 0.5 about twice the one at test time; recalibrating removes it."""
    torch.manual_seed(0)
    layer = normrnn.RNN(
        4, 64, num_layers=2, nonlinearity="relu", dropout=0.5, momentum=1.0, norm="sequence"
    )
    x = torch.randn(50, 40, 4)
    layer(x)
    trained = layer.state_dict()["norm_l1.running_var"].clone()
    normrnn.recalibrate(layer, [x])
    ratio = (trained / layer.state_dict()["norm_l1.running_var"]).median()
    assert 1.5 < ratio < 3.0


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", STATISTICAL)
def test_gradients_of_running_statistics(norm: str, training: bool) -> None:
    """As of any other tensor, by the compiled kernel as by torch's operations; in training those of
    the single row at the end."""
    wide = build("lstm", norm, bidirectional=True).train(training)
    x = torch.randn(6, 5, INPUT, dtype=torch.float64)
    lengths = [6, 5, 5, 5, 5]
    found = []
    for layer in (wide, copy.deepcopy(wide).float()):
        tensors = {
            name: b.detach().clone().requires_grad_(b.is_floating_point())
            for name, b in layer.named_buffers()
        }
        own = x.to(layer.weight_hh_l0.dtype)
        arguments = (own,), {"lengths": lengths}
        output, _ = torch.func.functional_call(layer, tensors, *arguments)
        leaves = {name: t for name, t in tensors.items() if t.requires_grad}
        grads = torch.autograd.grad(
            output.square().sum(), list(leaves.values()), materialize_grads=True
        )
        found.append(dict(zip(leaves, grads, strict=True)))
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name].double(), expected, rtol=1e-3, atol=1e-3)
    assert training or all(grad.any() for grad in found[0].values())
