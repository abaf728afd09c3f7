"""The recurrences as functions: numerical gradients, ownership of inputs, differentiating twice."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from normrnn import ops
from normrnn.ops import Peephole, Steps

H = 2
SIZES = [(3, 3, 3), (3, 2, 2, 1), (1, 1), (2,)]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
class TestNumericalGradients:
    @pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
    def test_rnn(self, sizes: tuple[int, ...], reverse: bool, nonlinearity: str) -> None:
        steps = Steps(sizes)

        def f(gates: Tensor, h0: Tensor, w: Tensor) -> Tensor:
            return ops.rnn(gates, h0, w, steps, reverse=reverse, nonlinearity=nonlinearity)

        assert gradcheck(f, (leaf(H, steps.rows), leaf(H, steps.batch), leaf(H, H)))

    @pytest.mark.parametrize("peepholes", ["", "o", "ifo", "if"])
    def test_lstm(self, sizes: tuple[int, ...], reverse: bool, peepholes: str) -> None:
        steps = Steps(sizes)

        def f(gates: Tensor, h0: Tensor, c0: Tensor, w: Tensor, *p: Tensor) -> tuple[Tensor, ...]:
            peephole = Peephole(**dict(zip(peepholes, p, strict=True)))
            return ops.lstm(gates, h0, c0, w, steps, peephole=peephole, reverse=reverse)

        state = leaf(H, steps.batch), leaf(H, steps.batch)
        vectors = [leaf(H) for _ in peepholes]
        assert gradcheck(f, (leaf(4 * H, steps.rows), *state, leaf(4 * H, H), *vectors))

    @pytest.mark.parametrize("bias", [True, False])
    def test_gru(self, sizes: tuple[int, ...], reverse: bool, bias: bool) -> None:
        steps = Steps(sizes)

        def f(gates: Tensor, h0: Tensor, w: Tensor, *b: Tensor) -> Tensor:
            return ops.gru(gates, h0, w, b[0] if b else None, steps, reverse=reverse)

        extra = [leaf(H)] if bias else []
        assert gradcheck(f, (leaf(3 * H, steps.rows), leaf(H, steps.batch), leaf(3 * H, H), *extra))


def calls(steps: Steps, donate: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Gate inputs and the states made of them, for each cell."""
    made = []
    h0, c0 = leaf(H, steps.batch), leaf(H, steps.batch)
    gates = leaf(H, steps.rows) * 1
    made.append((gates, ops.rnn(gates, h0, leaf(H, H), steps, donate=donate)))
    gates = leaf(4 * H, steps.rows) * 1
    made.append((gates, ops.lstm(gates, h0, c0, leaf(4 * H, H), steps, donate=donate)[0]))
    gates = leaf(3 * H, steps.rows) * 1
    made.append((gates, ops.gru(gates, h0, leaf(3 * H, H), None, steps, donate=donate)))
    return made


def test_inputs_are_left_alone_unless_donated() -> None:
    torch.manual_seed(3)
    kept = calls(Steps((3, 2)))
    before = [gates.clone() for gates, _ in kept]
    torch.manual_seed(3)
    for (gates, out), again, was in zip(kept, calls(Steps((3, 2))), before, strict=True):
        assert torch.equal(gates, was)
        assert torch.equal(again[1], out)


def test_donating_does_not_change_the_result() -> None:
    torch.manual_seed(3)
    kept = calls(Steps((3, 2)))
    torch.manual_seed(3)
    for (_, out), (_, donated) in zip(kept, calls(Steps((3, 2)), donate=True), strict=True):
        assert torch.equal(out, donated)


def test_differentiating_twice_says_that_it_is_not_available() -> None:
    for gates, out in calls(Steps((3, 2))):
        (grad,) = torch.autograd.grad(out.square().sum(), gates, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.sum().backward()


def test_flip_turns_every_sequence_over_its_own_length() -> None:
    """TRAPS 13: the padding never comes first."""
    steps = Steps((3, 2, 1))  # lengths 3, 2, 1; rows a0 b0 c0 a1 b1 a2
    rows = ["a0", "b0", "c0", "a1", "b1", "a2"]
    flipped = [rows[k] for k in steps.flip(torch.device("cpu")).tolist()]
    assert flipped == ["a2", "b1", "c0", "a1", "b0", "a0"]
    assert steps.lengths == (3, 2, 1)


def test_final_state_of_each_direction() -> None:
    """TRAPS 14: backwards it is the state at frame 0, forwards the one at the last frame."""
    steps = Steps((3, 2, 1))
    states = torch.arange(6.0).view(1, 6)
    assert steps.final(states, reverse=True).tolist() == [[0, 1, 2]]
    assert steps.final(states, reverse=False).tolist() == [[5, 4, 2]]
    assert Steps((2, 2)).final(states[:, :4], reverse=False).tolist() == [[2, 3]]
