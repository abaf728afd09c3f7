"""Population statistics from one pass."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import normrnn
from tests.helpers import STATISTICAL, build, unchanged


def rows_of(x: Tensor, lengths: list[int]) -> Tensor:
    """The unpadded frames of (T, B, I), (N, I)."""
    return torch.cat([x[:n, b] for b, n in enumerate(lengths)])


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4).filter(
        lambda batches: sum(map(sum, batches)) > 1
    ),
    st.sampled_from(["sequence", "frame"]),
    st.sampled_from(["lstm", "gru", "tanh"]),
)
def test_first_layer_equals_the_whole_set_for_any_split(
    batches: list[list[int]], norm: str, cell: str
) -> None:
    """Pooled by frame count. Single rows and lone slices are rows like any other."""
    torch.manual_seed(sum(map(sum, batches)))
    layer = build(cell, norm, bidirectional=True, num_layers=2)
    data = [(torch.randn(max(b), len(b), 3, dtype=torch.float64) * 2 + 1, b) for b in batches]
    normrnn.recalibrate(layer, [{"input": x, "lengths": lengths} for x, lengths in data])
    rows = torch.cat([rows_of(x, lengths) for x, lengths in data])
    for suffix in ("", "_reverse"):
        pre = rows @ getattr(layer, f"weight_ih_l0{suffix}").detach().t()
        normaliser = getattr(layer, f"norm_l0{suffix}")
        same(normaliser.running_mean, pre.mean(0))
        same(normaliser.running_var, pre.var(0))
        assert normaliser.num_batches_tracked.item() == len(batches)


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4),
    st.booleans(),
)
def test_slots_equal_the_whole_set_for_any_split(batches: list[list[int]], reverse: bool) -> None:
    """Per step t < K: over all frames t; slots with fewer than two rows stay as they were."""
    torch.manual_seed(sum(map(sum, batches)))
    layer = build("gru", "frame-slots", bidirectional=reverse)
    before = {name: b.clone() for name, b in layer.named_buffers()}
    data = [(torch.randn(max(b), len(b), 3, dtype=torch.float64), b) for b in batches]
    normrnn.recalibrate(layer, [{"input": x, "lengths": lengths} for x, lengths in data])
    for suffix in ("", "_reverse") if reverse else ("",):
        weight = getattr(layer, f"weight_ih_l0{suffix}").detach()
        normaliser = getattr(layer, f"norm_l0{suffix}")
        for t in range(3):
            frames = [x[t, b] for x, n in data for b in range(len(n)) if n[b] > t]
            if len(frames) < 2:
                name = f"norm_l0{suffix}.running_mean"
                assert torch.equal(normaliser.running_mean[t], before[name][t])
                continue
            pre = torch.stack(frames) @ weight.t()
            same(normaliser.running_mean[t], pre.mean(0))
            same(normaliser.running_var[t], pre.var(0))


@pytest.mark.parametrize("norm", STATISTICAL)
def test_all_layers_on_a_single_batch(norm: str) -> None:
    """With one batch every layer's population is that batch: momentum 1 gives the same."""
    layer = build("lstm", norm, num_layers=2, bidirectional=True, dropout=0.0)
    twin = build("lstm", norm, num_layers=2, bidirectional=True, momentum=1.0)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(3, 4, 3, dtype=torch.float64)
    normrnn.recalibrate(layer, [x])
    twin(x)
    for name, buffer in layer.named_buffers():
        if name.endswith(("mean", "var")):
            same(buffer, dict(twin.named_buffers())[name])


def check_whole(layer: Any, rows: Tensor) -> None:
    """The statistics are those of all rows."""
    pre = rows @ layer.weight_ih_l0.detach().t()
    same(layer.norm_l0.running_mean, pre.mean(0))
    same(layer.norm_l0.running_var, pre.var(0))


class TestBatches:
    x, y = torch.linspace(-2, 2, 36).view(4, 3, 3).double().sin(), torch.zeros(3)
    z = torch.linspace(-1, 3, 30).view(5, 2, 3).double().cos()

    def test_forms(self) -> None:
        """Tensors, packed sequences, tuples as args, dicts as kwargs; a broken one is left out."""
        packed = pack_padded_sequence(self.z, torch.tensor([5, 2]))
        padded = self.z.clone()
        padded[2:, 1] = float("nan")
        broken = torch.full_like(self.x, float("nan"))
        whole, rows = self.x.flatten(0, 1), rows_of(self.z, [5, 2])
        for batches, expected in (
            ([self.x, packed], [whole, rows]),
            ([(self.x, None, [4, 1, 2])], [rows_of(self.x, [4, 1, 2])]),
            ([self.x, {"input": padded, "lengths": [5, 2]}], [whole, rows]),
            ([[self.x]], [whole]),
            ([self.x, broken], [whole]),
        ):
            layer = build("lstm", "sequence")
            assert normrnn.recalibrate(layer, batches) is layer
            check_whole(layer, torch.cat(expected))

    def test_of_x_and_y_a_model_of_one_argument_gets_x(self) -> None:
        averaged: Any = torch.optim.swa_utils.AveragedModel(
            nn.Sequential(build("lstm", "sequence"))
        )
        plain = nn.Sequential(build("lstm", "sequence"))
        for model, layer in ((plain, plain[0]), (averaged, averaged.module[0])):
            for batch in ((self.x, self.y), [self.x, self.y]):
                normrnn.recalibrate(model, [batch])
                check_whole(layer, self.x.flatten(0, 1))
        data = torch.utils.data.TensorDataset(self.x.transpose(0, 1), self.y)
        first = build("lstm", "sequence", batch_first=True)
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        normrnn.recalibrate(nn.Sequential(first), loader)
        check_whole(first, self.x.flatten(0, 1))

    def test_step_carries_a_state(self) -> None:
        """By hand: step 0 of both windows, the second from the carried state."""
        x, layer = torch.randn(6, 4, 3).double(), build("lstm", "hidden", num_layers=2)
        carried: list[Any] = [None]

        def step(model: nn.Module, window: Tensor) -> None:
            assert model is layer
            _, carried[0] = model(window, carried[0])

        normrnn.recalibrate(layer, x.split(3), step=step)
        with torch.no_grad(), normrnn.batch_statistics(layer):
            _, (h, _) = layer(x[:3])
        w_x, w_h = layer.weight_ih_l0.detach(), layer.weight_hh_l0.detach()
        sums = torch.cat([x[0] @ w_x.t(), x[3] @ w_x.t() + h[0] @ w_h.t()])
        same(layer.norm_l0.running_mean[0], sums.mean(0))
        same(layer.norm_l0.running_var[0], sums.var(0))

    @pytest.mark.parametrize(
        ("batches", "match"),
        [
            ([3], "int.*step="),
            (["text"], "str.*step="),
            ([[torch.zeros(2, 2, 3), torch.zeros(2)]], "list.*step="),
            ([], "got none"),
            (torch.zeros(6, 5, 3), r"\[x\]"),  # it would be cut into time steps
            (pack_padded_sequence(torch.zeros(6, 5, 3), [6] * 5), r"\[x\]"),
            ([torch.full((6, 5, 3), torch.nan).double()], "finite"),
        ],
    )
    def test_refused(self, batches: Any, match: str) -> None:
        layer = build("lstm", "sequence")
        with unchanged(layer), pytest.raises(ValueError, match=match):
            normrnn.recalibrate(layer, batches)
        with pytest.raises(ValueError):
            normrnn.convert(nn.LSTM(3, 4).double(), batches=batches)

    def test_a_failing_call_points_to_step(self) -> None:
        """(x, y) might be (x, hx)."""
        with pytest.raises(RuntimeError, match="hx") as error:
            normrnn.recalibrate(build("lstm", "sequence"), [(self.x, torch.ones(3))])
        assert "step=" in error.value.__notes__[0]

    @pytest.mark.parametrize("norm", ["none", "layer", "rms"])
    def test_a_model_without_statistics_is_left_as_it_is(self, norm: str) -> None:
        layer = build("lstm", norm)
        with unchanged(layer), pytest.warns(UserWarning, match="nothing to do"):
            assert normrnn.recalibrate(layer, [self.x]) is layer


class TestModes:
    def model(self) -> nn.Sequential:
        model = nn.Sequential(build("lstm", "sequence", num_layers=2, dropout=0.9), nn.Dropout(0.5))
        model[1].eval()
        return model

    def modes(self, model: nn.Module) -> list[bool]:
        return [m.training for m in model.modules()]

    def step(self, model: nn.Module, x: Tensor) -> None:
        assert not any(self.modes(model))
        assert not torch.is_grad_enabled()
        assert isinstance(model, nn.Sequential)
        model[0](x)

    def test_restored(self) -> None:
        for training in (True, False):
            model = self.model()
            model[0].train(training)
            before = self.modes(model)
            x = torch.randn(4, 3, 3, dtype=torch.float64)
            normrnn.recalibrate(model, [x], step=self.step)
            assert self.modes(model) == before
            model[0].eval()
            assert torch.equal(model[0](x)[0], model[0](x)[0])

    def test_restored_after_an_exception_with_buffers_untouched(self) -> None:
        model = self.model()
        modes = self.modes(model)

        def batches() -> Any:
            yield torch.randn(4, 3, 3, dtype=torch.float64)
            raise OSError("the disk is gone")

        with unchanged(model), pytest.raises(OSError, match="disk"):
            normrnn.recalibrate(model, batches(), step=self.step)
        assert self.modes(model) == modes
        kept = model[0].norm_l0.running_mean.clone()  # type: ignore[union-attr]
        model[0](torch.randn(4, 3, 3, dtype=torch.float64))  # training goes on
        assert not torch.equal(model[0].norm_l0.running_mean, kept)  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [{}, {"time_steps": 20}])
def test_steps_that_differ(options: dict[str, Any]) -> None:
    """A warning where one set of statistics is kept for steps of other means or variances."""
    alike, other = torch.randn(20, 50, 3), torch.linspace(-3, 3, 20)[:, None, None]
    model = nn.Sequential(normrnn.GRU(3, 4, norm="frame", **options))
    normrnn.recalibrate(model, [alike, alike[:, :5]])
    normrnn.recalibrate(model, [(alike + other)[:, :2]])  # too few rows to tell
    for strange in (alike + other, alike * other.square()):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            normrnn.recalibrate(model, [strange])
        assert ["time_steps=" in str(w.message) for w in said] == ([] if options else [True])
    normrnn.recalibrate(nn.Sequential(normrnn.GRU(3, 4, norm="sequence")), [alike + other])


@pytest.mark.parametrize("x", [torch.randn(1, 1, 3), torch.ones(6, 5, 3)])
def test_rows_that_cannot_be_shared_over_time(x: Tensor) -> None:
    layer = normrnn.LSTM(3, 4, norm="frame", time_steps=3)
    layer(torch.randn(6, 5, 3))
    with unchanged(layer), pytest.raises(ValueError, match="norm_l0"):
        normrnn.recalibrate(layer, [x], shared=True)
    assert layer.time_steps == 3


def test_sharing_changes_nothing_if_a_later_layer_cannot_be_measured() -> None:
    first, second = (normrnn.LSTM(3, 3, norm="frame", time_steps=3) for _ in range(2))
    model = nn.ModuleList([first, second])
    for layer in (first, second):
        layer(torch.randn(6, 5, 3))

    def step(_: nn.Module, x: Tensor) -> None:
        first(x)
        second(x[:1, :1])  # a single row

    with unchanged(model), pytest.raises(ValueError, match=r"1\.norm_l0"):
        normrnn.recalibrate(model, [torch.randn(6, 5, 3)], step=step, shared=True)
    assert first.time_steps == second.time_steps == 3
    assert [n.time_steps for layer in (first, second) for n in layer.normalisers()] == [3, 3]  # type: ignore[attr-defined]


def test_one_slot_is_that_of_the_first_step() -> None:
    """As training fills it; not all steps pooled."""
    layer: Any = normrnn.GRU(3, 2, norm="frame", time_steps=1)
    x = torch.randn(6, 8, 3) + torch.arange(6.0)[:, None, None]
    normrnn.recalibrate(layer, [x[:, :3], x[:, 3:]])
    first = x[0] @ layer.weight_ih_l0.t()
    torch.testing.assert_close(layer.norm_l0.running_mean[0], first.mean(0))
    torch.testing.assert_close(layer.norm_l0.running_var[0], first.var(0))


def test_what_is_shared_in_inference_mode_can_be_trained() -> None:
    layer: Any = normrnn.GRU(3, 4, norm="frame", time_steps=4)
    x = torch.randn(6, 5, 3)
    with torch.inference_mode():
        normrnn.recalibrate(layer, [x], shared=True)
    kept = layer.norm_l0.running_mean.clone()
    layer.train()(x + 1)[0].sum().backward()
    assert not torch.equal(layer.norm_l0.running_mean, kept)
