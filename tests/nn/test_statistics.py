"""Statistics in the layers: what is normalised, what is remembered, what is refused."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import normrnn
from normrnn import norms
from tests.helpers import (
    NORMS,
    STATISTICAL,
    buffers,
    build,
    check_against_reference,
    close,
    gradients,
    same,
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


def test_slots_and_lone_rows_by_hand() -> None:
    """A slot is of the frame's own index in both directions, for sequences of 3, 2 and 1 frames. A
    lone row is normalised with the statistics from before, and updates nothing."""
    layer = gate_free("frame-slots", bidirectional=True, eps=1e-12, momentum=1.0)
    with torch.no_grad():
        layer.weight_ih_l0_reverse.fill_(1)
    for normaliser in layer.normalisers():
        normaliser.running_mean.fill_(2)
        normaliser.running_var.fill_(4)
        normaliser.num_batches_tracked.fill_(1)
    x = [[1, 3, 5], [20, 40, 999], [8, 999, 999]]
    out, _ = layer(torch.tensor(x, dtype=torch.float64)[:, :, None], lengths=[3, 2, 1])
    assert out[2, 0].tolist() == pytest.approx([(8 - 2) / 2] * 2)
    for normaliser in layer.normalisers():
        assert normaliser.running_mean.flatten().tolist() == pytest.approx([3, 30, 2])
        assert normaliser.running_var.flatten().tolist() == pytest.approx([4, 200, 4])
        assert normaliser.num_batches_tracked.tolist() == [2, 2, 1]


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

    @pytest.mark.parametrize("norm", ["recurrent", "recurrent-shared"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("shared", [False, True])
    def test_a_second_pass_changes_little(
        self, norm: str, dtype: torch.dtype, shared: bool
    ) -> None:
        """What is recurrent is measured with the constant steps that eval mode will have."""
        torch.manual_seed(3)
        layer = build("lstm", norm, dtype=dtype)
        x = torch.randn(6, 3200, 3, dtype=dtype)
        x[2::2] = torch.tensor([1.0, -2.0, 0.5])
        for normaliser in layer.normalisers():
            normaliser.reset_running_stats()
        with torch.no_grad():
            normrnn.recalibrate(layer, x.split(16, 1), shared=shared)
            once = layer.eval()(x)[0]
            normrnn.recalibrate(layer, x.split(16, 1))
            difference = (layer(x)[0] - once).square().mean().sqrt()
        # Not 0: the first batches know less of the others.
        assert float(difference) < 0.05 * float(once.std())

    def test_few_rows_replace_no_running_statistics(self) -> None:
        """Single rows are normalised with running statistics until thirty are known."""
        layer = build("lstm", "frame-slots", dtype=torch.float64)
        for name, buffer in layer.named_buffers():
            buffer.fill_(4 if "mean" in name else 9)
        x, seen = torch.randn(4, 12, 3, dtype=torch.float64), []

        def step(model: Any, batch: Tensor) -> None:
            seen.append(model(batch)[0])

        with torch.no_grad():
            expected = [layer.eval()(one)[0] for one in x.split(1, 1)]
            normrnn.recalibrate(layer, x.split(1, 1), step=step)
        torch.testing.assert_close(seen, expected)
        after = layer.normalisers()[0].running_mean
        assert not after.eq(4).any()


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm", STATISTICAL)
class TestTooFewRows:
    @pytest.mark.parametrize("T", [1, 4])
    def test_running_statistics_serve_and_stay(self, norm: str, form: str, T: int) -> None:
        """A last batch of one must not end training: it warns once and continues. So it is if
        batch statistics are asked for."""
        if T > 1 and norm not in BY_STEP:
            return
        for cell in ("tanh", "lstm", "gru"):
            layer = build(cell, norm, num_layers=2, bidirectional=True)
            with unchanged(layer):
                with pytest.warns(UserWarning, match="single row") as said:
                    first = give(layer, T, form)
                assert len(said) == 1
                give(layer, T, form)  # warnings are errors here
                with normrnn.batch_statistics(layer):
                    again = give(layer, T, form)
            for found in (first, again):
                close(found, give(layer.eval(), T, form), "output", 1e-12)
            first.square().sum().backward()
            assert gradients(layer).keys() == dict(layer.named_parameters()).keys()

    @pytest.mark.parametrize("is_tracked", [True, False])
    def test_without_statistics_it_is_an_error(
        self, norm: str, form: str, is_tracked: bool
    ) -> None:
        layer = build("lstm", norm, track_running_stats=is_tracked)
        for name, buffer in layer.named_buffers():
            if name.endswith("tracked"):
                buffer.zero_()
        with unchanged(layer):
            with pytest.raises(ValueError, match="got 1"):
                give(layer, 1, form)
            if norm in BY_STEP and not is_tracked:  # a single row at the end
                with pytest.raises(ValueError, match="track_running_stats=True"):
                    layer(torch.randn(4, 2, 3, dtype=torch.float64), lengths=[4, 2])


@pytest.mark.parametrize("norm", STATISTICAL)
def test_batch_statistics(norm: str) -> None:
    """Nothing is updated, and modes come back, also when nested and after an exception."""
    layer = build("lstm", norm, num_layers=2, dropout=0.5)
    model = torch.nn.Sequential(layer, torch.nn.Dropout(0.5).eval())
    x = torch.randn(4, 3, 3, dtype=torch.float64)
    plain = layer.eval()(x)[0]
    layer.train()
    with unchanged(model):
        with pytest.raises(KeyError), normrnn.batch_statistics(model):
            raise KeyError
        assert layer.training
        with normrnn.batch_statistics(model) as given:
            assert given is model
            assert not any(m.training for m in model.modules())
            wanted = layer(x)[0]
            with normrnn.batch_statistics(layer):
                assert torch.equal(layer(x)[0], wanted)  # dropout is off
            assert torch.equal(layer(x)[0], wanted)
        assert layer.training
        assert layer.norm_l0.training
        assert not model[1].training
        assert torch.equal(layer.eval()(x)[0], plain)
        assert not torch.isclose(wanted, plain).all()


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
    x = torch.randn(6, 5, 3, dtype=torch.float64)
    lengths = [6, 5, 5, 5, 5]
    found = []
    for layer in (wide, copy.deepcopy(wide).float()):
        tensors = {n: b.detach().clone() for n, b in layer.named_buffers()}
        leaves = {n: b.requires_grad_() for n, b in tensors.items() if b.is_floating_point()}
        arguments = (x.to(layer.weight_hh_l0.dtype),), {"lengths": lengths}
        loss = torch.func.functional_call(layer, tensors, *arguments)[0].square().sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
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
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


@pytest.mark.parametrize("norm", STATISTICAL)
def test_another_thread_does_not_see_what_this_one_asks_for(norm: str) -> None:
    """Batch statistics, or to pool: what it computes meanwhile is not pooled either."""
    layer, twin = (build("gru", norm, num_layers=2).eval() for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(4, 3, 3, dtype=torch.float64)
    before, others = layer(x)[0], []
    with normrnn.batch_statistics(layer):
        others.append(elsewhere(lambda: layer(x)[0]))
        assert not torch.isclose(layer(x)[0], before).all()

    def step(model: Any, batch: Tensor) -> None:
        model(batch)
        elsewhere(lambda: model(batch * 5)[0])
        others.append(elsewhere(lambda: model(batch)[0]))

    normrnn.recalibrate(layer, [x], step=step)
    normrnn.recalibrate(twin, [x])
    assert all(torch.equal(other, before) for other in others)
    same(buffers(layer), buffers(twin))
