"""The compiled recurrence: the loop's numbers in float64, NaN where it belongs, equal bits."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from normrnn.ops.loop import loop
from normrnn.ops.native.library import describe
from tests.kernel_cases import (
    NORMS,
    Case,
    check,
    computed,
    drawn,
    in_float64,
    is_native,
    native,
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


def check_against_float64(case: Case) -> None:
    tensors = tensors_of(case)
    with threads(case.threads):
        assert is_native(*problem(case, tensors))
        outputs, grads = computed(case, tensors, native)
        with torch.no_grad():  # what there is no way back from may be computed another way
            alone = outputs_of(native(*problem(case, tensors)))
    wanted, wanted_grads = in_float64(case, tensors)
    beside, beside_grads = computed(case, tensors, loop) if case.is_steep else (None, None)
    check(outputs, wanted, 2e-5, beside=beside)
    check(alone, wanted, 2e-5, beside=beside)
    check(grads, wanted_grads, 1e-3 if case.few else 1e-4, least=1e-2, beside=beside_grads)


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
        # Sequence 1, step 1: it lies in the rows 1, 6, 11, 14.
        own, others = torch.tensor([1, 6, 11, 14]), torch.ones(15, dtype=torch.bool)
        others[own] = False
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
        if bad != bad:
            h = case.hidden
            before, after = dirty["rows"][1, :h], dirty["rows"][11, :h]
            assert before.isfinite().all()
            assert after.isnan().all()
            assert dirty["rows"][1, h:].isnan().all()
        dx, dh = torch.autograd.grad(result.rows[others].sum(), (tensors["x"], tensors["h0"]))
        assert dx[others].isfinite().all()
        assert dh[:, beside].isfinite().all()

    def test_of_a_batch_s_statistics_everybody_hears(self) -> None:
        case = Case("LSTM", "sequence", (5, 5, 3, 2), hidden=7)
        tensors = tensors_of(case)
        tensors["x"].data[6] = float("nan")
        result = native(*problem(case, tensors))
        assert result.rows.isnan().all()
        assert result.statistics is not None
        assert result.statistics.mean.isnan().all()

    @pytest.mark.parametrize("mode", MODES)
    def test_gradients_of_a_nan_are_the_loops(self, mode: str) -> None:
        case = Case(mode, "plain", (3, 3, 3), hidden=7)
        tensors = tensors_of(case)
        tensors["x"].data[4] = float("nan")
        _, grads = computed(case, tensors, native)
        _, wanted = computed(case, tensors, loop)
        for name, value in wanted.items():
            torch.testing.assert_close(grads[name], value, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("norm", NORMS)
class TestEqualBits:
    def case(self, norm: str, count: int) -> Case:
        sizes = (9, 9, 7, 5, 5, 1)
        return Case("LSTM", norm, sizes, (False, True), 11, 19, peephole="ifo", threads=count)

    def test_twice_the_same(self, norm: str, count: int) -> None:
        case = self.case(norm, count)
        tensors = tensors_of(case)
        with threads(count):
            first = computed(case, tensors, native)
            again = computed(case, tensors, native)
        for one, other in zip(first, again, strict=True):
            for name, value in one.items():
                assert torch.equal(value, other[name]), name
