"""What reaches C: only real float32 memory of a CPU, whole and alive; threads and processes."""

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
    computed,
    is_native,
    native,
    one_direction,
    outputs_of,
    problem,
    tensors_of,
)

pytestmark = pytest.mark.skipif(describe()["kernels"] == "torch", reason="no kernels here")
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

    @pytest.mark.parametrize("sizes", [(0,), ()])
    def test_nothing_is_not_sent_to_c(self, sizes: tuple[int, ...]) -> None:
        weights = [Weights(None, torch.ones(8, 2))]
        spec, tensors = describe_call("LSTM", (False,), torch.empty(0, 8), weights, Norm())
        assert not is_native(spec, Steps(sizes), tensors)

    def test_no_features_are_not_sent_to_c(self) -> None:
        weights = [Weights(torch.empty(8, 0), torch.ones(8, 2))]
        spec, tensors = describe_call("LSTM", (False,), torch.empty(4, 0), weights, Norm())
        assert not is_native(spec, Steps((2, 2)), tensors)
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


def test_nothing_is_kept_without_a_way_back() -> None:
    """Under no_grad, parameters still say that they want a gradient."""
    kept: list[bool] = []
    tensors = tensors_of(ANY)
    entry = library()
    assert entry is not None
    seen = entry.forward

    def forward(packed: bytes) -> int:
        kept.append(bool(LAYOUT.unpack(packed)[NUMBERS.index("keep")]))
        return seen(packed)

    entry.forward = forward
    try:
        with torch.no_grad():
            native(*problem(ANY, tensors))
        native(*problem(ANY, tensors))
    finally:
        entry.forward = seen
    assert kept == [False, True]


def test_counts_belong_to_the_caller() -> None:
    case = Case("GRU", "frame", (4, 3))
    first = native(*problem(case, tensors_of(case))).statistics
    assert first is not None
    first.count.zero_()
    second = native(*problem(case, tensors_of(case))).statistics
    assert second is not None
    assert second.count.tolist() == [4, 3]
