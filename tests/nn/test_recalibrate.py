"""Population statistics from one pass."""

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import normrnn
from tests.helpers import STATISTICAL, build, same, unchanged

X: Any = {"dtype": torch.float64}
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=50)
@given(
    st.lists(LENGTHS, min_size=1, max_size=4).filter(lambda batches: sum(map(sum, batches)) > 1),
    st.sampled_from(["sequence", "frame", "frame-slots"]),
    st.sampled_from(["lstm", "gru", "tanh"]),
)
def test_the_first_layer_equals_the_whole_set_for_any_split(
    batches: list[list[int]], norm: str, cell: str
) -> None:
    """Pooled by frame count, over all frames or per step; single rows and lone slices are rows like
    any other, and slots with fewer than two rows stay as they were."""
    torch.manual_seed(sum(map(sum, batches)))
    layer = build(cell, norm, bidirectional=True)
    before = copy.deepcopy(layer.state_dict())
    data = [(torch.randn(max(b), len(b), 3, **X) * 2 + 1, b) for b in batches]
    normrnn.recalibrate(layer, [{"input": x, "lengths": lengths} for x, lengths in data])
    steps = [
        [x[t, b] for x, lengths in data for b, n in enumerate(lengths) if n > t] for t in range(5)
    ]
    groups = steps[:3] if norm == "frame-slots" else [[row for rows in steps for row in rows]]
    for end in ("", "_reverse"):
        normaliser = getattr(layer, f"norm_l0{end}")
        mean, var = (
            b.view(len(groups), -1) for b in (normaliser.running_mean, normaliser.running_var)
        )
        for k, rows in enumerate(groups):
            if len(rows) < 2:
                assert torch.equal(mean[k], before[f"norm_l0{end}.running_mean"][k])
                continue
            pre = torch.stack(rows) @ getattr(layer, f"weight_ih_l0{end}").detach().t()
            same(mean[k], pre.mean(0), 1e-10)
            same(var[k], pre.var(0), 1e-10)
        if norm != "frame-slots":
            assert normaliser.num_batches_tracked.item() == len(batches)


@pytest.mark.parametrize("norm", STATISTICAL)
def test_all_layers_on_a_single_batch(norm: str) -> None:
    """With one batch every layer's population is that batch: momentum 1 gives the same."""
    layer = build("lstm", norm, num_layers=2, bidirectional=True, dropout=0.0)
    twin = build("lstm", norm, num_layers=2, bidirectional=True, momentum=1.0)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(3, 4, 3, **X)
    normrnn.recalibrate(layer, [x])
    twin(x)
    for name, buffer in layer.named_buffers():
        if name.endswith(("mean", "var")):
            same(buffer, twin.get_buffer(name), 1e-10)


def check_whole(layer: Any, rows: Tensor) -> None:
    """The statistics are those of all rows."""
    pre = rows.reshape(-1, 3) @ layer.weight_ih_l0.detach().t()
    same(layer.norm_l0.running_mean.flatten(), pre.mean(0), 1e-10)
    same(layer.norm_l0.running_var.flatten(), pre.var(0), 1e-10)


class TestBatches:
    x, y = torch.linspace(-2, 2, 36).view(4, 3, 3).double().sin(), torch.zeros(3)
    z = torch.linspace(-1, 3, 30).view(5, 2, 3).double().cos()

    def test_forms(self) -> None:
        """Tensors, packed sequences, tuples as args, dicts as kwargs; a broken one is left out."""
        packed = pack_padded_sequence(self.z, torch.tensor([5, 2]))
        padded = self.z.clone()
        padded[2:, 1] = float("nan")
        broken = torch.full_like(self.x, float("nan"))
        both = torch.cat([self.x.flatten(0, 1), packed.data])
        ragged = pack_padded_sequence(self.x, torch.tensor([4, 1, 2]), enforce_sorted=False).data
        for batches, expected in (
            ([self.x, packed], both),
            ([self.x, {"input": padded, "lengths": [5, 2]}], both),
            ([(self.x, None, [4, 1, 2])], ragged),
            ([[self.x]], self.x),
            ([self.x, broken], self.x),
        ):
            layer = build("lstm", "sequence")
            assert normrnn.recalibrate(layer, batches) is layer
            check_whole(layer, expected)

    def test_of_x_and_y_a_model_of_one_argument_gets_x(self) -> None:
        plain: Any = nn.Sequential(build("lstm", "sequence"))
        averaged: Any = torch.optim.swa_utils.AveragedModel(copy.deepcopy(plain))
        for model, layer in ((plain, plain[0]), (averaged, averaged.module[0])):
            for batch in ((self.x, self.y), [self.x, self.y]):
                normrnn.recalibrate(model, [batch])
                check_whole(layer, self.x)
        data = torch.utils.data.TensorDataset(self.x.transpose(0, 1), self.y)
        first = build("lstm", "sequence", batch_first=True)
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        normrnn.recalibrate(nn.Sequential(first), loader)
        check_whole(first, self.x)

    def test_step_carries_a_state(self) -> None:
        """By hand: step 0 of both windows, the second from the carried state."""
        x, layer = torch.randn(6, 4, 3, **X), build("lstm", "hidden", num_layers=2)
        carried: list[Any] = [None]

        def step(model: nn.Module, window: Tensor) -> None:
            assert model is layer
            _, carried[0] = model(window, carried[0])

        normrnn.recalibrate(layer, x.split(3), step=step)
        with torch.no_grad(), normrnn.batch_statistics(layer):
            _, (h, _) = layer(x[:3])
        w_x, w_h = layer.weight_ih_l0.detach(), layer.weight_hh_l0.detach()
        sums = torch.cat([x[0] @ w_x.t(), x[3] @ w_x.t() + h[0] @ w_h.t()])
        same(layer.norm_l0.running_mean[0], sums.mean(0), 1e-10)
        same(layer.norm_l0.running_var[0], sums.var(0), 1e-10)

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


def test_modes_are_restored() -> None:
    """Also after an exception, which leaves the buffers as they were."""

    def modes() -> list[bool]:
        return [m.training for m in model.modules()]

    def step(_: nn.Module, x: Tensor) -> None:
        assert not any(modes())
        assert not torch.is_grad_enabled()
        model[0](x)

    def batches() -> Any:
        yield x
        raise OSError("the disk is gone")

    x = torch.randn(4, 3, 3, **X)
    for training in (True, False):
        layer = build("lstm", "sequence", num_layers=2, dropout=0.9).train(training)
        model = nn.Sequential(layer, nn.Dropout(0.5).eval())
        model.training = True
        before = modes()
        with unchanged(model), pytest.raises(OSError, match="disk"):
            normrnn.recalibrate(model, batches(), step=step)
        assert modes() == before
        normrnn.recalibrate(model, [x], step=step)
        assert modes() == before
        kept = layer.norm_l0.running_mean.clone()
        assert torch.equal(layer(x + 1)[0], layer(x + 1)[0]) != training  # dropout
        assert torch.equal(layer.norm_l0.running_mean, kept) != training


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


def test_one_slot_is_that_of_the_first_step() -> None:
    """As training fills it; not all steps pooled."""
    layer = build("gru", "frame-slots", time_steps=1)
    x = torch.randn(6, 8, 3, **X) + torch.arange(6.0)[:, None, None]
    normrnn.recalibrate(layer, [x[:, :3], x[:, 3:]])
    check_whole(layer, x[0])


class TestShared:
    """``shared=True``: statistics per step become one."""

    @pytest.mark.parametrize("norm", ["frame-slots", "hidden", "sequence"])
    @pytest.mark.parametrize("cell", ["tanh", "lstm", "gru"])
    def test_equals_a_layer_that_never_had_slots(self, cell: str, norm: str) -> None:
        other = {"frame-slots": "frame", "hidden": "hidden-shared"}.get(norm, norm)
        layer, twin = (build(cell, n, num_layers=2, bidirectional=True) for n in (norm, other))
        twin.load_state_dict(dict(layer.named_parameters()), strict=False)
        batches: list[Any] = [torch.randn(5, 4, 3, **X) * k for k in (1, 3)]
        # No lone rows: those are normalised with running statistics, which differ.
        batches.append({"input": torch.randn(6, 3, 3, **X), "lengths": [6, 3, 6]})
        normrnn.recalibrate(layer, batches, shared=True)
        normrnn.recalibrate(twin, batches)
        assert layer.time_steps is None
        same(layer.state_dict(), twin.state_dict(), 1e-9)
        x = torch.randn(7, 2, 3, **X)
        same(layer.eval()(x), twin.eval()(x), 1e-9)
        same(layer.fold()(x), layer(x), 1e-9)
        layer.train()(x)  # and trains on, with shared statistics
        assert layer.norm_l0.num_batches_tracked.item() == 4

    def test_what_no_batch_reached_keeps_its_slots(self) -> None:
        model: Any = nn.ModuleList([build("gru", "frame-slots"), build("gru", "hidden")])
        x = torch.randn(5, 4, 3, **X)
        normrnn.recalibrate(model, [x], step=lambda m, x: m[0](x), shared=True)  # type: ignore
        assert [layer.time_steps for layer in model] == [None, 3]
        assert model[1].norm_l0.running_mean.shape == (3, 6)

    @pytest.mark.parametrize("x", [torch.randn(1, 1, 3), torch.ones(6, 5, 3)])
    def test_rows_that_cannot_be_shared(self, x: Tensor) -> None:
        """Nothing changes, also if it is a later layer that cannot be measured."""
        first, second = (normrnn.LSTM(3, 3, norm="frame", time_steps=3) for _ in range(2))
        model = nn.ModuleList([first, second])
        for layer in model:
            layer(torch.randn(6, 5, 3))

        def step(_: nn.Module, batch: Tensor) -> None:
            first(batch)
            second(x)

        with unchanged(model), pytest.raises(ValueError, match="norm_l0"):
            normrnn.recalibrate(first, [x], shared=True)
        with unchanged(model), pytest.raises(ValueError, match=r"1\.norm_l0"):
            normrnn.recalibrate(model, [torch.randn(6, 5, 3)], step=step, shared=True)
        for layer in (first, second):
            assert [layer.time_steps, *(n.time_steps for n in layer.normalisers())] == [3, 3]  # type: ignore[attr-defined]

    def test_in_inference_mode(self) -> None:
        """The layer can be trained afterwards."""
        layer: Any = normrnn.GRU(3, 4, norm="frame", time_steps=4)
        x = torch.randn(6, 5, 3)
        with torch.inference_mode():
            normrnn.recalibrate(layer, [x], shared=True)
        kept = layer.norm_l0.running_mean.clone()
        layer.train()(x + 1)[0].sum().backward()
        assert not torch.equal(layer.norm_l0.running_mean, kept)
