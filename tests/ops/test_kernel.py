"""The compiled recurrence: the loop's numbers in float64, NaN where it belongs, equal bits.

And what reaches C: only real float32 memory of a CPU, whole and alive.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from normrnn import ops
from normrnn.ops import Norm, Steps, Weights, describe_call
from normrnn.ops.loop import loop
from normrnn.ops.native.kernel import LAYOUT, NUMBERS, update
from normrnn.ops.native.library import describe, library
from normrnn.ops.statistics import Statistics
from tests.kernel_cases import (
    NORMS,
    Case,
    Tensors,
    check,
    check_against_float64,
    computed,
    drawn,
    in_float64,
    is_native,
    native,
    one_direction,
    outputs_of,
    problem,
    tensors_of,
    threads,
)

pytestmark = pytest.mark.skipif(describe()["kernels"] == "torch", reason="no kernels here")
MODES = ["RNN_TANH", "RNN_RELU", "LSTM", "GRU", "LIGRU"]
WAYS = [(False,), (True,), (False, True)]


def cases(rounds: int) -> list[Case]:
    """Every cell, norm and direction that many times, the rest at random."""
    draw = random.Random(rounds)
    every = [
        kind
        for kind in itertools.product(MODES, NORMS, WAYS)
        if "cell" not in kind[1] or kind[0] == "LSTM"
    ]
    return [drawn(*kind, draw) for _ in range(rounds) for kind in every]


@pytest.mark.parametrize("case", cases(1), ids=str)
def test_numbers_and_gradients_are_the_loops(case: Case) -> None:
    check_against_float64(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(20), ids=str)
def test_numbers_and_gradients_are_the_loops_at_length(case: Case) -> None:
    check_against_float64(case)


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_large_weights_and_many_rows(norm: str) -> None:
    check_against_float64(Case("LSTM", norm, (30,) * 25 + (7,) * 8, (False, True), 70, 530))


def test_one_row_is_normalised_by_what_is_given() -> None:
    """One row has no variance; as the loop says, also for all rows together."""
    for norm, mode in itertools.product(("sequence", "frame", "step", "recurrent"), MODES):
        check_against_float64(Case(mode, norm, (1,), inputs=0, seed=3))
        case = Case(mode, norm, (1,), inputs=0)
        spec, steps, own = problem(case, tensors_of(case))
        with pytest.raises(ValueError, match="a time step with a single row"):
            native(spec, steps, own._replace(mean=None, var=None))


@pytest.mark.parametrize("norm", ["frame", "frame slots", "recurrent", "recurrent cell", "step"])
def test_a_step_with_equal_rows_is_normalised_by_what_is_given(norm: str) -> None:
    """Of W_x x alone; without given statistics by its own, as the loop."""
    for mode in ["LSTM"] if "cell" in norm else ["GRU", "LSTM"]:
        case = Case(mode, norm, (9, 9, 7, 5, 1), (False, True), 6, 19, constant=(0, 2), threads=2)
        for inputs in (0, 6):
            check_against_float64(replace(case, inputs=inputs))
    case = Case("LSTM", norm, (9, 9, 7), constant=(0, 2))
    spec, steps, own = problem(case, tensors_of(case))
    without = own._replace(mean=None, var=None)
    given, none = native(spec, steps, own), native(spec, steps, without)
    assert torch.equal(given.rows, none.rows) == (norm == "step")
    assert torch.allclose(none.rows, loop(spec, steps, without).rows, atol=1e-3)


@pytest.mark.parametrize("norm", ["row", "row cell", "rms"])
def test_numbers_near_the_smallest_are_as_good_as_torchs(norm: str) -> None:
    """They have few digits left, for the kernel as for torch's operations in float32."""
    for mode, scale in itertools.product(["LSTM"] if "cell" in norm else MODES, (1e-38, 1e-41)):
        case = Case(mode, norm, (7, 7, 4), (False, True), 3, 13, peephole="ifo")
        tensors = tensors_of(case)
        with torch.no_grad():
            tensors["x"] *= scale
        found, by_torch = (computed(case, tensors, compute) for compute in (native, loop))
        for own, other, wanted in zip(found, by_torch, in_float64(case, tensors), strict=True):
            check(own, wanted, 1e-4, least=1e-30, beside=other)


ALONE = ["plain", "frame fixed", "step fixed", "row", "row cell", "rms", "recurrent fixed"]
ALONE += ["recurrent cell fixed"]


class TestNotANumber:
    """Rows of sequence 1 have NaN or infinity; the others' rows, states and gradients do not."""

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("norm", ALONE)
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("count", [1, 2])
    def test_it_stays_in_its_sequence(self, mode: str, norm: str, bad: float, count: int) -> None:
        if "cell" in norm and mode != "LSTM":
            return
        case = Case(mode, norm, (5, 5, 3, 2), (False, True), hidden=7, peephole="ifo")
        tensors = tensors_of(case)
        others = torch.ones(15, dtype=torch.bool)
        others[[1, 6, 11, 14]] = False  # the rows of sequence 1
        with threads(count):
            clean = outputs_of(native(*problem(case, tensors)))
            tensors["x"].data[6] = bad
            result = native(*problem(case, tensors))
        dirty, wanted = outputs_of(result), outputs_of(loop(*problem(case, tensors)))
        assert torch.equal(dirty["rows"][others], clean["rows"][others])
        beside = torch.tensor([0, 2, 3, 4])
        for name in ("h", "c") if mode == "LSTM" else ("h",):
            assert torch.equal(dirty[name][:, beside], clean[name][:, beside])
        for name, value in wanted.items():
            assert torch.equal(dirty[name].isnan(), value.isnan()), name
        dx, dh = torch.autograd.grad(result.rows[others].sum(), (tensors["x"], tensors["h0"]))
        assert dx[others].isfinite().all()
        assert dh[:, beside].isfinite().all()

    def test_all_rows_hear_of_a_batchs_statistics(self) -> None:
        case = Case("LSTM", "sequence", (5, 5, 3, 2), hidden=7)
        tensors = tensors_of(case)
        tensors["x"].data[6] = float("nan")
        result = outputs_of(native(*problem(case, tensors)))
        assert result["rows"].isnan().all()
        assert result["mean"].isnan().all()

    @pytest.mark.parametrize("mode", MODES)
    def test_gradients_of_a_nan_are_the_loops(self, mode: str) -> None:
        case = Case(mode, "plain", (3, 3, 3), hidden=7)
        tensors = tensors_of(case)
        tensors["x"].data[4] = float("nan")
        grads, wanted = (computed(case, tensors, compute)[1] for compute in (native, loop))
        torch.testing.assert_close(grads, wanted, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
@pytest.mark.parametrize("norm", NORMS)
def test_equal_bits_every_time(norm: str, count: int) -> None:
    sizes = (9, 9, 7, 5, 5, 1)
    case = Case("LSTM", norm, sizes, (False, True), 11, 19, peephole="ifo", threads=count)
    tensors = tensors_of(case)
    with threads(count):
        first, again = (computed(case, tensors, native) for _ in range(2))
    torch.testing.assert_close(first, again, rtol=0, atol=0)


ANY = Case("LSTM", "frame", (5, 4, 4), (False, True), 3, 7, peephole="ifo")
TENSORS = ["x", "h0", "c0", "w_ih1", "w_hh0", "peephole_o1", "weight", "bias", "mean", "var"]


def served(tensors: Tensors, case: Case = ANY) -> bool:
    return is_native(*problem(case, tensors))


class Wrapped(Tensor):
    pass


class TestWhoIsServed:
    @pytest.mark.parametrize("name", TENSORS)
    @pytest.mark.parametrize(
        "other",
        [
            lambda t: t.double(),
            lambda t: t.bfloat16(),
            lambda t: t.to("meta"),
            lambda t: t.as_subclass(Wrapped),
            lambda t: t.detach().to_sparse(),
        ],
        ids=["float64", "bfloat16", "meta", "subclass", "sparse"],
    )
    def test_every_tensor_is_looked_at(self, name: str, other: Callable[[Tensor], Tensor]) -> None:
        tensors = tensors_of(ANY)
        assert served(tensors)
        assert not served(tensors | {name: other(tensors[name])})

    def test_forward_mode_is_for_the_loop(self) -> None:
        tensors = {name: t.detach() for name, t in tensors_of(ANY).items()}
        with forward_ad.dual_level():
            assert not served(tensors)
        assert served(tensors)

    def test_no_rows_and_no_features_are_not_sent_to_c(self) -> None:
        for sizes, w_ih in (((0,), None), ((), None), ((2, 2), torch.empty(8, 0))):
            weights, x = [Weights(w_ih, torch.ones(8, 2))], torch.empty(sum(sizes), 8)
            x = x if w_ih is None else x[:, :0]
            spec, tensors = describe_call("LSTM", (False,), x, weights, Norm())
            assert not is_native(spec, Steps(sizes), tensors)
        assert torch.equal(ops.recur(spec, Steps((2, 2)), tensors).rows, torch.zeros(4, 2))


def test_batched_cotangents_are_for_the_loop() -> None:
    """A Jacobian of many rows at once: C would be handed a stand-in for a tensor."""
    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(8, 2)
    rows = one_direction("LSTM", x, w, Steps((3, 2)))[0]
    heads = torch.eye(rows.numel()).view(-1, *rows.shape)
    (at_once,) = torch.autograd.grad(rows, x, heads, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(rows, x, head, retain_graph=True)[0] for head in heads]
    torch.testing.assert_close(at_once, torch.stack(one_by_one))


class TestAnyMemory:
    @pytest.mark.parametrize("norm", NORMS)
    def test_the_user_s_defaults_are_not_ours(self, norm: str) -> None:
        """float64 or another device by default: buffers for C are float32 of the CPU."""
        case = replace(ANY, norm=norm)
        tensors = tensors_of(case)
        wanted = computed(case, tensors, native)[0]
        torch.set_default_dtype(torch.float64)
        try:
            wide = outputs_of(native(*problem(case, tensors)))
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.device("meta"):
            result = native(*problem(case, tensors))
            result.rows.backward(torch.ones(result.rows.shape, device="cpu"))
        for found in (wide, outputs_of(result)):
            for name, value in wanted.items():
                assert found[name].dtype == torch.float32, name
                assert torch.equal(found[name], value), name

    def test_layouts_live_until_the_way_back(self) -> None:
        """Many batches of other lengths come between a call and its gradient."""
        case = Case("RNN_TANH", "plain", (4, 3, 2), inputs=3)
        tensors = tensors_of(case)
        rows = native(*problem(case, tensors)).rows
        with torch.no_grad():
            for length in range(1, 600):
                other = replace(case, sizes=(1,) * length)
                native(*problem(other, tensors_of(other)))
        rows.sum().backward()
        wide = {n: t.detach().double().requires_grad_() for n, t in tensors.items()}
        loop(*problem(case, wide)).rows.sum().backward()
        grads, wanted = ({n: t.grad for n, t in own.items()} for own in (tensors, wide))
        check(grads, wanted, 1e-5)  # type: ignore[arg-type]

    @pytest.mark.parametrize("norm", ["frame", "frame fixed", "sequence fixed", "step fixed"])
    @pytest.mark.parametrize("again", [False, True])
    def test_statistics_may_change_before_the_way_back(self, norm: str, again: bool) -> None:
        """Running statistics do, in training, for the lone row that was normalised by them."""
        case = Case("LSTM", norm, (4, 4, 1), inputs=3)
        tensors = tensors_of(case)
        rows = native(*problem(case, tensors)).rows
        wide = {n: t.detach().double().requires_grad_() for n, t in tensors.items()}
        wanted = loop(*problem(case, wide)).rows
        tensors["mean"].add_(3)
        tensors["var"].mul_(9)
        names = [n for n, t in tensors.items() if t.requires_grad]
        found = [
            torch.autograd.grad(r.square().sum(), [own[n] for n in names], create_graph=again)
            for r, own in ((rows, tensors), (wanted, wide))
        ]
        grads, expected = (dict(zip(names, f, strict=True)) for f in found)
        check(grads, expected, 1e-4)

    def test_an_input_changed_in_place_is_told(self) -> None:
        tensors = tensors_of(ANY)
        rows = native(*problem(ANY, tensors)).rows
        tensors["w_hh0"].data.add_(0)  # unseen by autograd, as an optimizer's is not
        with torch.no_grad():
            tensors["w_hh0"].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            rows.sum().backward()

    def test_update_of_running_statistics_looks_at_all_it_is_given(self) -> None:
        mean, var, count = torch.zeros(3), torch.ones(3), torch.full((2,), 4.0)
        whole = torch.rand(2, 3) + 1
        batch = Statistics(whole, whole.t().contiguous().t(), count)
        assert update(mean, var, batch, 0.1) is None
        assert update(mean[:2], var[:2], batch._replace(var=whole), 0.1) is None
        twice = torch.full((4,), 4.0)[::2]
        assert update(mean, var, Statistics(whole, whole, twice), 0.1) is None
        assert update(mean.double(), var, Statistics(whole, whole, count), 0.1) is None
        assert torch.equal(mean, torch.zeros(3))
        assert update(mean, var, Statistics(whole, whole, count), 0.1) is True
        torch.testing.assert_close(mean, 0.1 * whole.mean(0))


def test_nothing_is_kept_without_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under no_grad, parameters still say that they want a gradient."""
    kept: list[bool] = []
    tensors, entry = tensors_of(ANY), library()
    assert entry is not None
    seen = entry.forward

    def forward(packed: bytes) -> int:
        kept.append(bool(LAYOUT.unpack(packed)[NUMBERS.index("keep")]))
        return seen(packed)

    monkeypatch.setattr(entry, "forward", forward)
    with torch.no_grad():
        native(*problem(ANY, tensors))
    native(*problem(ANY, tensors))
    assert kept == [False, True]


def test_counts_belong_to_the_caller() -> None:
    case = Case("GRU", "frame", (4, 3))
    first, second = (outputs_of(native(*problem(case, tensors_of(case)))) for _ in range(2))
    first["count"].zero_()
    assert second["count"].tolist() == [4, 3]
