"""Statistics in the layers: what is normalised, what is remembered, what is refused."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import normrnn
from normrnn import norms
from tests.helpers import (
    INPUT,
    NORMS,
    STATISTICAL,
    build,
    check_against_reference,
    close,
    unchanged,
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


class TestByHand:
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


@pytest.mark.parametrize("norm", STATISTICAL)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("t", [0, 2, 4])
def test_a_broken_batch_leaves_all_buffers_alone(norm: str, bad: float, t: int) -> None:
    """At a used slot, past the last slot, or in the single row at the end."""
    layer = build("gru", norm, num_layers=2, bidirectional=True)
    x = torch.randn(5, 3, 3, dtype=torch.float64)
    x[t, 1, 0] = bad
    # A gate of ±∞ saturates: the layer above sees finite numbers.
    first = torch.nn.ModuleList([layer.norm_l0, layer.norm_l0_reverse])
    with unchanged(layer if t < 4 or bad != bad else first):
        layer(x, lengths=[3, 5, 4])
    with pytest.raises(AssertionError), unchanged(layer):
        layer(torch.randn(5, 3, 3, dtype=torch.float64))
    assert all(bool(b.isfinite().all()) for b in layer.buffers())


class TestConstantSteps:
    """Frame-wise statistics where all rows of W_x x at a step are equal, as at a start token."""

    @pytest.mark.parametrize("norm", ["frame", "frame-slots", "recurrent", "recurrent-shared"])
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
        x = torch.randn(4, 1, 3, dtype=dtype).expand(4, 5, 3)
        with unchanged(layer):
            layer(x)
            normrnn.recalibrate(layer, [x])


FORMS = ["dense", "unbatched", "packed", "padded"]


def give(layer: Any, T: int, form: str) -> Tensor:
    """Output (T, D·H) of one sequence."""
    x = torch.linspace(-1, 1, T * 3, dtype=torch.float64).view(T, 1, 3)
    if form == "dense":
        return layer(x)[0][:, 0]
    if form == "unbatched":
        return layer(x[:, 0])[0]
    if form == "packed":
        return layer(torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([T])))[0].data
    return layer(torch.cat([x, x]), lengths=[T])[0][:T, 0]


@pytest.mark.parametrize("norm", STATISTICAL)
class TestTooFewRows:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("T", [1, 4])
    def test_running_statistics_serve_and_stay(self, norm: str, form: str, T: int) -> None:
        """A last batch of one must not end training: it warns once and continues."""
        if T > 1 and norm not in BY_STEP:
            return
        for cell in ("tanh", "lstm", "gru"):
            layer = build(cell, norm, num_layers=2, bidirectional=True)
            with unchanged(layer):
                with pytest.warns(UserWarning, match="single row") as said:
                    first = give(layer, T, form)
                assert len(said) == 1
                give(layer, T, form)  # warnings are errors here
            close(first, give(layer.eval(), T, form), "output", 1e-12)
            first.square().sum().backward()
            assert all(p.grad is not None for p in layer.parameters())

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("is_tracked", [True, False])
    def test_without_statistics_it_is_an_error(
        self, norm: str, is_tracked: bool, form: str
    ) -> None:
        layer = build("lstm", norm, track_running_stats=is_tracked)
        for name, buffer in layer.named_buffers():
            if name.endswith("tracked"):
                buffer.zero_()
        with unchanged(layer), pytest.raises(ValueError, match="got 1"):
            give(layer, 1, form)

    def test_asked_for_batch_statistics_too(self, norm: str) -> None:
        layer = build("lstm", norm)
        with normrnn.batch_statistics(layer), pytest.warns(UserWarning, match="single row"):
            found = give(layer, 1, "dense")
        close(found, give(layer.eval(), 1, "dense"), "output", 1e-12)

    def test_a_single_row_at_the_end_without_running_statistics(self, norm: str) -> None:
        if norm in BY_STEP:
            layer = build("lstm", norm, track_running_stats=False)
            with pytest.raises(ValueError, match="track_running_stats=True"):
                layer(torch.randn(4, 2, 3, dtype=torch.float64), lengths=[4, 2])


class TestBatchStatistics:
    @pytest.mark.parametrize("norm", STATISTICAL)
    def test_nothing_is_updated_and_modes_come_back(self, norm: str) -> None:
        layer = build("lstm", norm, num_layers=2, dropout=0.5)
        model = torch.nn.Sequential(layer, torch.nn.Dropout(0.5).eval())
        x = torch.randn(4, 3, 3, dtype=torch.float64)
        with unchanged(model), normrnn.batch_statistics(model) as given:
            assert given is model
            assert not any(m.training for m in model.modules())
            assert torch.equal(layer(x)[0], layer(x)[0])  # dropout is off
        assert layer.training
        assert layer.norm_l0.training
        assert not model[1].training

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


def test_training_under_no_grad_updates_too() -> None:
    layer, x = build("lstm", "sequence"), torch.randn(4, 3, 3, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(AssertionError), unchanged(layer):
        layer(x)


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


def test_a_state_that_is_not_finite_changes_no_buffer() -> None:
    """Where the input transition is finite and the other is not."""
    layer, x = build("lstm", "recurrent", cell_norm=True), torch.randn(4, 3, 3).double()
    h = torch.zeros(1, 3, 2, dtype=torch.float64)
    h[0, 1, 0] = float("inf")
    with unchanged(layer):
        layer(x, (h, torch.zeros_like(h)))


def elsewhere(call: Callable[[], Any]) -> Any:
    """What it returns in another thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("norm", STATISTICAL)
class TestOtherThreads:
    """Another thread that runs the same model does not see what this one asks for."""

    def test_batch_statistics(self, norm: str) -> None:
        layer = build("lstm", norm, num_layers=2).eval()
        x = torch.randn(4, 3, 3, dtype=torch.float64)
        wanted = layer(x)[0]
        with normrnn.batch_statistics(layer):
            other = elsewhere(lambda: layer(x)[0])
            own = layer(x)[0]
        assert torch.equal(other, wanted)
        assert not torch.isclose(own, wanted).all()

    def test_recalibrate(self, norm: str) -> None:
        """Until it is done; and what the other thread computes is not pooled."""
        layer, twin = build("gru", norm).eval(), build("gru", norm).eval()
        twin.load_state_dict(layer.state_dict())
        x = torch.randn(4, 3, 3, dtype=torch.float64)
        before, others = layer(x)[0], []

        def step(model: Any, batch: Tensor) -> None:
            model(batch)
            others.append(elsewhere(lambda: model(batch * 5)[0]))
            others.append(elsewhere(lambda: model(batch)[0]))

        normrnn.recalibrate(layer, [x], step=step)
        assert torch.equal(others[1], before)
        normrnn.recalibrate(twin, [x])
        for (name, a), b in zip(layer.named_buffers(), twin.buffers(), strict=True):
            assert torch.equal(a, b), name
