"""Ways of calling a layer: backward passes, odd batches, resets, states to start from."""

import itertools
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import normrnn
from tests.helpers import CELLS, NORMS, buffers, build, close, gradients, inputs, run, same, states

LENGTHS = [2, 5, 3]
X: Any = {"dtype": torch.float64}
CASES = list(zip(itertools.cycle(CELLS), NORMS, strict=False))
"""Every cell and every norm."""
TORCHS: dict[Any, Any] = {normrnn.RNN: nn.RNN, normrnn.LSTM: nn.LSTM, normrnn.GRU: nn.GRU}


@pytest.mark.parametrize(("cell", "norm"), CASES)
def test_backward_passes(cell: str, norm: str) -> None:
    """Of two calls at once, again through a kept graph, and from each result alone."""
    layer = build(cell, norm, num_layers=2, bidirectional=True, momentum=0.0)
    state, batches = states(layer, 3), [inputs(6, LENGTHS) for _ in range(2)]

    def losses(x: Tensor) -> Tensor:
        outputs = run(layer, x, LENGTHS, "padded", state)
        return torch.stack([out.square().sum() for out in outputs])

    def grads(loss: Tensor, keep: bool = False) -> list[Tensor]:
        own = list(layer.parameters())
        return [*torch.autograd.grad(loss, own, retain_graph=keep, materialize_grads=True)]

    def total(parts: list[list[Tensor]]) -> list[Tensor]:
        return [torch.stack(grad).sum(0) for grad in zip(*parts, strict=True)]

    both, found = [losses(x) for x in batches], []
    for x, loss in zip(batches, both, strict=True):
        found.append(grads(loss.sum(), keep=True))
        same(grads(loss.sum(), keep=True), found[-1])
        same(total([grads(losses(x)[k]) for k in range(len(loss))]), found[-1], 1e-10)
    same(grads(torch.stack(both).sum()), total(found), 1e-10)


@pytest.mark.parametrize("norm", NORMS)
class TestInputs:
    def test_memory_layout_does_not_matter(self, norm: str) -> None:
        layer = build("lstm", norm, num_layers=2, bidirectional=True, momentum=0.0)
        x = torch.randn(5, 4, 3, **X)
        state = tuple(torch.randn(4, 1, 2, **X).expand(4, 4, 2) for _ in "hc")
        wanted = layer(x, tuple(s.contiguous() for s in state))[0]
        strided = torch.empty(5, 8, 6, **X)[:, ::2, ::2].copy_(x)
        for given in (x.permute(2, 1, 0).contiguous().permute(2, 1, 0), strided):
            assert not given.is_contiguous()
            close(layer(given, state)[0], wanted, "output", 1e-12)

    def test_nothing_that_is_given_is_changed(self, norm: str) -> None:
        layer, x = build("lstm", norm), torch.randn(5, 4, 3, **X)
        state = torch.randn(1, 4, 2, **X), torch.randn(1, 4, 2, **X)
        tensors = [x, *state, *(p.detach() for p in layer.parameters())]
        copies = [v.clone() for v in tensors]
        layer(x, state)[0].sum().backward()
        layer(x, state, lengths=[5, 1, 2, 2])
        same(tensors, copies)


class TestEmptyBatches:
    @pytest.mark.parametrize(("cell", "norm"), CASES)
    @pytest.mark.parametrize("T", [4, 0])
    def test_nothing_but_sequences_of_length_0(self, cell: str, norm: str, T: int) -> None:
        layer = build(cell, norm, num_layers=2, bidirectional=True)
        before, state = buffers(layer), states(layer, 3)
        x = torch.full((T, 3, 3), float("nan"), **X)
        output, *final = run(layer, x, [0, 0, 0], "padded", state)
        assert torch.equal(output, torch.zeros(T, 3, 4, **X))
        assert all(torch.equal(a, b) for a, b in zip(final, state, strict=False))
        same(buffers(layer), before)
        (output.sum() + 1).backward()
        same(gradients(layer), {n: torch.zeros_like(p) for n, p in layer.named_parameters()})

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("make", TORCHS)
    def test_no_sequences(self, make: Any, norm: str, training: bool) -> None:
        """Empty output as torch's, no buffer updated, gradients of zero."""
        layer = make(3, 2, 2, bidirectional=True, **NORMS[norm]).train(training)
        plain, x = TORCHS[make](3, 2, 2, bidirectional=True), torch.zeros(5, 0, 3)
        before = buffers(layer)
        nobody = torch.zeros(0, dtype=torch.long)
        resets = torch.zeros(5, 0, dtype=torch.bool)
        for more in ({}, {"lengths": []}, {"lengths": nobody}, {"resets": resets}):
            (output, final), (wanted, last) = layer(x, **more), plain(x)
            assert output.shape == wanted.shape
            final, last = (s if isinstance(s, tuple) else (s,) for s in (final, last))
            assert [s.shape for s in final] == [s.shape for s in last]
            output.sum().backward()
        same(gradients(layer), {n: torch.zeros_like(p) for n, p in layer.named_parameters()})
        same(buffers(layer), before)


def cuts(T: int, lengths: list[int]) -> Tensor:
    """At frame 0, at neighbours, at a last frame, and in the padding."""
    resets = torch.zeros(T, len(lengths), dtype=torch.bool)
    resets[0, 0] = resets[2, 1] = resets[3, 1] = resets[5, 1] = resets[3, 2] = True
    for b, n in enumerate(lengths):
        resets[n:, b] = True
    return resets


class TestResets:
    @pytest.mark.parametrize(
        ("cell", "norm"), [case for case in CASES if "time_steps" not in NORMS[case[1]]]
    )
    def test_equals_one_piece_after_the_other(self, cell: str, norm: str) -> None:
        """At test time: ``hx`` is the first piece's alone, the final state the last one's."""
        layer, lengths = build(cell, norm).eval(), [2, 6, 4]
        x, resets = inputs(6, lengths), cuts(6, lengths)
        h, c = states(layer, 3)
        output, *final = run(layer, x, lengths, "padded", (h, c), resets)
        for b, n in enumerate(lengths):
            borders = sorted({0, n, *(t for t in range(n) if resets[t, b])})
            start: Any = (h[:, b], c[:, b]) if layer.mode == "LSTM" else h[:, b]
            state, rows = None if resets[0, b] else start, []
            last: Any = None
            for first, end in pairwise(borders):
                piece, last = layer(x[first:end, b], state)
                rows, state = [*rows, piece], None
            close(output[:n, b], torch.cat(rows), f"sequence {b}", 1e-12)
            parts = last if layer.mode == "LSTM" else [last]
            for mine, theirs in zip(final, parts, strict=True):
                close(mine[:, b], theirs, f"final state of {b}", 1e-12)

    @pytest.mark.parametrize("cell", CELLS)
    def test_nothing_leaks_over_a_border(self, cell: str) -> None:
        """Not even NaN, and no gradient."""
        layer, x = build(cell, "layer", bidirectional=True), torch.randn(6, 2, 3, **X)
        resets = torch.zeros(6, 2, dtype=torch.bool)
        resets[3, 0] = True
        wanted, broken = layer(x, resets=resets)[0], x.clone()
        broken[2, 0] = float("nan")
        output = layer(broken, resets=resets)[0]
        assert torch.equal(output[3:], wanted[3:])
        assert torch.equal(output[:, 1], wanted[:, 1])
        assert output[:3, 0].isnan().any()
        (grad,) = torch.autograd.grad(layer(x.requires_grad_(), resets=resets)[0][3:, 0].sum(), x)
        assert not grad[:3].any()
        assert grad[3:, 0].any()

    @pytest.mark.parametrize("is_packed", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_they_may_change_before_the_backward_pass(self, is_packed: bool, dtype: Any) -> None:
        """Programs that collect episodes in a buffer write the next ones into it."""
        layer = build("lstm", "sequence", dtype=dtype)
        x, cut = torch.randn(5, 4, 3, dtype=dtype), torch.rand(5, 4) < 0.4
        found = []
        for is_spoilt in (False, True):
            layer.zero_grad()
            given: Any = x
            resets: Any = cut.clone()
            if is_packed:
                lengths = torch.tensor([5, 5, 4, 1])
                given, resets = (pack_padded_sequence(v, lengths) for v in (x, resets))
            output: Any = layer(given, resets=resets)[0]
            if is_spoilt:
                (resets.data if is_packed else resets).fill_(False)
            (output.data if is_packed else output).square().sum().backward()
            found.append(gradients(layer))
        same(*found)


def test_second_derivatives_with_resets() -> None:
    layer = build("lstm", "sequence", bidirectional=True)
    x, start = torch.randn(4, 2, 3, **X), torch.randn(2, 1, 2, **X)
    resets = torch.tensor([[0, 1], [1, 0], [0, 0], [0, 1]], dtype=torch.bool)

    def f(x: Tensor, start: Tensor) -> Tensor:
        return layer(x, lengths=[4, 3], resets=resets, reset_to=(start, start))[0]

    assert torch.autograd.gradgradcheck(f, (x.requires_grad_(), start.requires_grad_()))


class TestLearnedStates:
    """``learn_initial_state``; the reference has its numbers."""

    @pytest.mark.parametrize("cell", ["lstm", "ligru"])
    def test_in_a_graph(self, cell: str) -> None:
        """Exported and compiled, with resets to a given state."""
        layer = build(cell, "sequence", learn_initial_state=True, dtype=torch.float32).eval()
        layer.requires_grad_(False)
        x, cut, start = torch.randn(6, 3, 3), torch.rand(6, 3) < 0.4, torch.randn(1, 1, 2)
        more = {"resets": cut, "reset_to": (start, start) if cell == "lstm" else start}
        wanted = layer(x, **more)[0]
        program = torch.export.export(layer, (x,), more)
        torch.testing.assert_close(program.module()(x, **more)[0], wanted)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, **more)[0], wanted)

    @pytest.mark.filterwarnings("ignore:LSTM with projections")
    def test_parameters(self) -> None:
        layer = normrnn.LSTM(3, 5, 2, norm=None, proj_size=2, learn_initial_state=True)
        own = {n: p for n, p in layer.named_parameters() if n[:3] in ("h_0", "c_0")}
        shapes = {n: tuple(p.shape) for n, p in own.items()}
        assert shapes == {"h_0_l0": (2,), "c_0_l0": (5,), "h_0_l1": (2,), "c_0_l1": (5,)}
        layer.reset_parameters()
        assert not any(p.any() for p in own.values())
