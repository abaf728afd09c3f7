"""``resets``: as if a sequence had been cut before these frames."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import normrnn
from normrnn.ops import Steps
from normrnn.ops.loop import loop
from normrnn.ops.native.library import describe
from tests.helpers import (
    CELLS,
    NORMS,
    STATISTICAL,
    build,
    check_against_reference,
    close,
    inputs,
    pull,
    run,
    states,
)
from tests.kernel_cases import (
    Case,
    check,
    computed,
    is_native,
    native,
    one_direction,
    pairs,
    problem,
    tensors_of,
    threads,
)

LENGTHS = [2, 6, 4]


def cuts(T: int, lengths: list[int]) -> Tensor:
    """At frame 0, at neighbours, at a last frame, and in the padding, where nobody looks."""
    resets = torch.zeros(T, len(lengths), dtype=torch.bool)
    resets[0, 0] = resets[2, 1] = resets[3, 1] = resets[5, 1] = resets[3, 2] = True
    for b, n in enumerate(lengths):
        resets[n:, b] = True
    return resets


@pytest.mark.matrix(6)
@pytest.mark.parametrize("form", ["padded", "batch_first", "unsorted"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", CELLS)
def test_every_layer_against_the_reference(
    cell: str, norm: str, bidirectional: bool, form: str
) -> None:
    """Outputs, gradients, buffers; statistics are over all rows, by the frame's own index."""
    T = 6 if form == "unsorted" else 7
    how: dict[str, Any] = {"bidirectional": bidirectional, "batch_first": form == "batch_first"}
    layer = build(cell, norm, num_layers=2, **how)
    for training in (True, False):
        layer.train(training)
        check_against_reference(layer, LENGTHS, form, T=T, resets=cuts(T, LENGTHS))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", CELLS)
def test_dense_and_unbatched(cell: str, norm: str) -> None:
    layer = build(cell, norm, bidirectional=True)
    resets = torch.rand(6, 3) < 0.4
    check_against_reference(layer, [6, 6, 6], "dense", resets=resets)
    layer.eval()
    check_against_reference(layer, [6], "unbatched", resets=resets[:, :1])
    layer.batch_first = True
    check_against_reference(layer, [6], "unbatched", resets=resets[:, :1])


def pieces(x: Tensor, resets: Tensor, lengths: list[int]) -> list[list[Tensor]]:
    """Every sequence, really cut."""
    found = []
    for b, n in enumerate(lengths):
        borders = sorted({0, n, *(t for t in range(n) if resets[t, b])})
        found.append([x[a:z, b] for a, z in pairwise(borders)])
    return found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("norm", ["sequence", "layer", "none"])
@pytest.mark.parametrize("cell", CELLS)
def test_equals_a_batch_of_the_pieces(
    cell: str, norm: str, bidirectional: bool, training: bool
) -> None:
    """The same rows, so the same sequence-wise statistics, in every layer of a stack."""
    layer = build(cell, norm, num_layers=2, bidirectional=bidirectional).train(training)
    x, resets = inputs(6, LENGTHS), cuts(6, LENGTHS)
    whole = run(layer, x, LENGTHS, "padded", None, resets)[0]
    cut = pieces(x, resets, LENGTHS)
    flat = [piece for parts in cut for piece in parts]
    alone = layer(pad_sequence(flat), lengths=[len(p) for p in flat])[0]
    rows = iter([alone[: len(p), k] for k, p in enumerate(flat)])
    for b, parts in enumerate(cut):
        joined = torch.cat([next(rows) for _ in parts])
        close(whole[: len(joined), b], joined, f"sequence {b}")


@pytest.mark.parametrize("norm", [name for name in NORMS if "time_steps" not in NORMS[name]])
@pytest.mark.parametrize("cell", CELLS)
def test_equals_one_piece_after_the_other(cell: str, norm: str) -> None:
    """At test time: forwards ``hx`` is the first piece's alone, the last state the last one's."""
    layer = build(cell, norm).eval()
    x, resets = inputs(6, LENGTHS), cuts(6, LENGTHS)
    h, c = states(layer, 3)
    output, *final = run(layer, x, LENGTHS, "padded", (h, c), resets)
    for b, parts in enumerate(pieces(x, resets, LENGTHS)):
        start: Any = (h[:, b], c[:, b]) if layer.mode == "LSTM" else h[:, b]
        first = layer(parts[0], None if resets[0, b] else start)
        each = [first, *(layer(piece) for piece in parts[1:])]
        close(output[: LENGTHS[b], b], torch.cat([e[0] for e in each]), f"sequence {b}", 1e-12)
        last = each[-1][1] if layer.mode == "LSTM" else each[-1][1:]
        for mine, theirs in zip(final, last, strict=True):
            close(mine[:, b], theirs, f"final state of {b}", 1e-12)


@pytest.mark.parametrize("cell", CELLS)
def test_nothing_leaks_over_a_border(cell: str) -> None:
    """Not even NaN, and no gradient."""
    layer = build(cell, "layer", bidirectional=True)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    resets = torch.zeros(6, 2, dtype=torch.bool)
    resets[3, 0] = True
    wanted = layer(x, resets=resets)[0]
    broken = x.clone()
    broken[2, 0] = float("nan")
    output = layer(broken, resets=resets)[0]
    assert torch.equal(output[3:], wanted[3:])
    assert torch.equal(output[:, 1], wanted[:, 1])
    assert output[:3, 0].isnan().any()
    (grad,) = torch.autograd.grad(layer(x.requires_grad_(), resets=resets)[0][3:, 0].sum(), x)
    assert torch.equal(grad[:3], torch.zeros_like(grad[:3]))
    assert grad[3:, 0].abs().max() > 0


@pytest.mark.parametrize("norm", STATISTICAL)
def test_running_statistics_of_the_input_do_not_depend_on_them(norm: str) -> None:
    x, resets = torch.randn(5, 3, 3, dtype=torch.float64), torch.rand(5, 3) < 0.5
    layer = build("gru", norm)
    twin = build("gru", norm)
    twin.load_state_dict(layer.state_dict())
    layer(x)
    twin(x, resets=resets)
    same = torch.equal(layer.norm_l0.running_mean, twin.norm_l0.running_mean)
    assert same == (layer.norm != "hidden")  # whose sums the state is part of


@given(st.integers(0, 10**6), st.sampled_from(list(CELLS)), st.sampled_from(list(NORMS)))
def test_any_resets(seed: int, cell: str, norm: str) -> None:
    torch.manual_seed(seed)
    lengths = torch.randint(1, 7, (4,)).tolist()
    layer = build(cell, norm, num_layers=2, bidirectional=bool(seed % 2)).train(bool(seed // 2 % 2))
    resets = torch.rand(max(lengths), 4) < torch.rand(())
    check_against_reference(layer, lengths, "padded", resets=resets, tol=1e-9)


@pytest.mark.parametrize("form", ["dense", "batch_first", "packed"])
def test_the_callers_tensor_may_change_before_the_way_back(form: str) -> None:
    """Who collects episodes in a buffer writes the next ones into it."""
    for dtype in (torch.float32, torch.float64):
        layer = build("lstm", "sequence", dtype=dtype, batch_first=form == "batch_first")
        x = torch.randn(5, 4, 3, dtype=dtype)
        buffer = torch.rand(5, 4) < 0.4
        found = []
        for spoil in (False, True):
            layer.zero_grad()
            resets: Any = buffer.clone()
            given_x: Any = x
            if form == "packed":
                given_x, resets = (
                    pack_padded_sequence(v, torch.tensor([5, 5, 4, 1])) for v in (x, resets)
                )
            elif form == "batch_first":
                given_x, resets = x.transpose(0, 1), resets.t()
            output = layer(given_x, resets=resets)[0]
            if spoil:
                (resets.data if form == "packed" else resets).fill_(False)
            (output.data if form == "packed" else output).square().sum().backward()
            found.append([p.grad.clone() for p in layer.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class TestRefused:
    layer = normrnn.GRU(3, 2, norm="sequence")

    def refuse(self, x: Any, resets: Any, match: str, **more: Any) -> None:
        with pytest.raises(ValueError, match=match):
            self.layer(x, resets=resets, **more)

    def test_shapes(self) -> None:
        x, wrong = torch.randn(5, 4, 3), torch.zeros(4, 5, dtype=torch.bool)
        self.refuse(x, wrong, r"shape of the input.*\(5, 4\), got \(4, 5\)")
        self.refuse(x, wrong, r"\(5, 4\), got \(4, 5\)", lengths=[5, 1, 2, 3])
        self.refuse(x[:, 0], wrong, r"\(5,\), got \(4, 5\)")

    def test_types(self) -> None:
        x = torch.randn(5, 4, 3)
        self.refuse(x, torch.zeros(5, 4), r"torch\.bool, got torch\.float32: give resets\.bool\(\)")
        self.refuse(x, torch.zeros(5, 4, dtype=torch.uint8), r"torch\.bool, got torch\.uint8")

    def test_packed_with_unpacked(self) -> None:
        x, resets = torch.randn(5, 2, 3), torch.zeros(5, 2, dtype=torch.bool)
        lengths = torch.tensor([2, 5])
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        self.refuse(packed, resets, "PackedSequence has to be one too.*got a Tensor")
        cut = pack_padded_sequence(resets, lengths, enforce_sorted=False)
        self.refuse(x, cut, "is packed and the input is not")
        other = pack_padded_sequence(resets, lengths.flip(0))
        self.refuse(packed, other, "another order than the input: sorted_indices differ")
        shorter = pack_padded_sequence(resets, torch.tensor([3, 4]), enforce_sorted=False)
        self.refuse(packed, shorter, "another order than the input: batch_sizes differ")


@pytest.mark.skipif(describe()["kernels"] == "torch", reason="no kernels here")
class TestCompiled:
    """The compiled loop, against the one of torch's operations in float64."""

    @pytest.mark.matrix(2)
    @pytest.mark.parametrize("reverse", [(False,), (True,), (False, True)])
    @pytest.mark.parametrize(("mode", "norm"), pairs("RNN_TANH", "RNN_RELU", "LSTM", "GRU"))
    def test_numbers_and_gradients(self, mode: str, norm: str, reverse: tuple[bool, ...]) -> None:
        for sizes, inputs_, count in (((7,) * 6, 3, 2), ((8, 8, 6, 6, 4, 1), 0, 1)):
            how: dict[str, Any] = {"peephole": "ifo", "hidden": 21, "threads": count}
            case = Case(mode, norm, sizes, reverse, inputs_, **how)
            resets = torch.rand(sum(sizes)) < 0.3
            resets[:2] = torch.tensor([True, False])

            def with_resets(compute: Any, resets: Tensor = resets) -> Any:
                def run(spec: Any, steps: Any, own: Any) -> Any:
                    return compute(spec, steps, own._replace(resets=resets))

                return run

            tensors = tensors_of(case)
            with threads(count):
                assert is_native(*problem(case, tensors))
                outputs, grads = computed(case, tensors, with_resets(native))
            wide = {
                n: t.detach().double().requires_grad_(t.requires_grad) for n, t in tensors.items()
            }
            wanted, wanted_grads = computed(case, wide, with_resets(loop))
            check(outputs, wanted, 2e-5)
            check(grads, wanted_grads, 1e-3 if case.few else 1e-4, least=1e-2)


def test_ready_gate_inputs_take_them_too() -> None:
    steps, resets = Steps((3, 3, 1)), torch.tensor([0, 1, 0, 0, 0, 1, 1], dtype=torch.bool)
    for mode, gates, reverse in (("RNN_TANH", 1, False), ("LSTM", 4, True), ("GRU", 3, False)):
        a, w = torch.randn(7, gates * 2), torch.randn(gates * 2, 2)
        with_them = one_direction(mode, a, w, steps, resets=resets, reverse=reverse)[0]
        cut = [[0, 3], [6], [1, 4], [2], [5]]  # rows of the pieces
        for rows in cut:
            one = one_direction(mode, a[rows], w, Steps((1,) * len(rows)), reverse=reverse)[0]
            torch.testing.assert_close(with_them[rows], one)
    gates, w = torch.randn(7, 2), torch.randn(2, 2)
    with pytest.raises(ValueError, match=r"resets should be torch\.bool of shape \(7,\).*float32"):
        one_direction("RNN_TANH", gates, w, steps, resets=torch.zeros(7))


def test_they_are_differentiated_twice() -> None:
    layer = build("lstm", "sequence", bidirectional=True)
    x = inputs(4, [4, 3])
    resets = torch.tensor([[0, 1], [1, 0], [0, 0], [0, 1]], dtype=torch.bool)

    def f(x: Tensor) -> Tensor:
        return layer(x, lengths=[4, 3], resets=resets)[0]

    safe = x.detach().nan_to_num().requires_grad_()
    assert torch.autograd.gradgradcheck(f, (safe,))
    pull([f(safe)])
    assert safe.grad is not None
