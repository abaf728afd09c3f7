"""Ways of calling a layer that a plain comparison of one step does not meet."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import normrnn
from tests.helpers import CELLS, NORMS, build, close, inputs, run, states

LENGTHS = [2, 5, 3]


def gradients(layer: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.matrix(5)
@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("cell", list(CELLS))
class TestBackward:
    def layer(self, cell: str, norm: str) -> Any:
        return build(cell, norm, num_layers=2, bidirectional=True, momentum=0.0)

    def test_twice_through_a_kept_graph(self, cell: str, norm: str) -> None:
        """The first pass must not spoil what the second one needs."""
        layer = self.layer(cell, norm)
        outputs = run(layer, inputs(6, LENGTHS), LENGTHS, "padded", states(layer, 3))
        loss = sum(out.square().sum() for out in outputs)
        assert isinstance(loss, Tensor)
        loss.backward(retain_graph=True)
        first = gradients(layer)
        layer.zero_grad()
        loss.backward()
        assert first.keys() == dict(layer.named_parameters()).keys()
        for name, value in gradients(layer).items():
            assert torch.equal(value, first[name]), name

    def test_two_calls_before_one_backward(self, cell: str, norm: str) -> None:
        layer = self.layer(cell, norm)
        a, b = inputs(6, LENGTHS), inputs(6, LENGTHS)
        separate: dict[str, Tensor] = {}
        for x in (a, b):
            layer.zero_grad()
            layer(x, lengths=LENGTHS)[0].square().sum().backward()
            for name, value in gradients(layer).items():
                separate[name] = separate.get(name, torch.zeros_like(value)) + value
        layer.zero_grad()
        one, two = layer(a, lengths=LENGTHS)[0], layer(b, lengths=LENGTHS)[0]
        (one.square().sum() + two.square().sum()).backward()
        for name, value in gradients(layer).items():
            close(value, separate[name], name)

    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_from_one_of_the_results_alone(self, cell: str, norm: str, which: int) -> None:
        """Only the output, only h_n, only c_n: the others get no gradient at all."""
        layer = self.layer(cell, norm)
        x, state = inputs(6, LENGTHS), states(layer, 3)
        outputs = run(layer, x, LENGTHS, "padded", state)
        which = min(which, len(outputs) - 1)
        outputs[which].square().sum().backward()
        alone = gradients(layer)
        layer.zero_grad()
        outputs = run(layer, x, LENGTHS, "padded", state)
        total = sum(out.square().sum() * (k == which) for k, out in enumerate(outputs))
        assert isinstance(total, Tensor)
        total.backward()
        for name, value in gradients(layer).items():
            close(alone.get(name, torch.zeros_like(value)), value, name)

    def test_results_may_be_changed_in_place(self, cell: str, norm: str) -> None:
        layer = self.layer(cell, norm)
        x = torch.randn(4, 3, 3, dtype=torch.float64)
        for lengths in (None, [*LENGTHS[:1], 4, 3]):
            layer.zero_grad()
            (layer(x, lengths=lengths)[0] * 2).sum().backward()
            wanted = gradients(layer)
            layer.zero_grad()
            out = layer(x, lengths=lengths)[0]
            out.mul_(2)
            out.sum().backward()
            for name, value in gradients(layer).items():
                close(value, wanted[name], name)


@pytest.mark.parametrize("norm", list(NORMS))
class TestInputs:
    def test_memory_layout_does_not_matter(self, norm: str) -> None:
        layer = build("lstm", norm, num_layers=2, bidirectional=True, momentum=0.0)
        x = torch.randn(5, 4, 3, dtype=torch.float64)
        state = tuple(torch.randn(4, 1, 2, dtype=torch.float64).expand(4, 4, 2) for _ in "hc")
        wanted = layer(x, tuple(s.contiguous() for s in state))[0]
        strided = torch.empty(5, 8, 6, dtype=torch.float64)[:, ::2, ::2].copy_(x)
        for given in (x.permute(2, 1, 0).contiguous().permute(2, 1, 0), strided):
            assert not given.is_contiguous()
            close(layer(given, state)[0], wanted, "output", 1e-12)

    def test_nothing_given_is_changed(self, norm: str) -> None:
        layer = build("lstm", norm)
        x = torch.randn(5, 4, 3, dtype=torch.float64)
        state = torch.randn(1, 4, 2, dtype=torch.float64), torch.randn(1, 4, 2, dtype=torch.float64)
        copies = [v.clone() for v in (x, *state)]
        parameters = {name: p.detach().clone() for name, p in layer.named_parameters()}
        layer(x, state)[0].sum().backward()
        layer(x, state, lengths=[5, 1, 2, 2])
        assert all(torch.equal(v, c) for v, c in zip((x, *state), copies, strict=True))
        assert all(torch.equal(p, parameters[name]) for name, p in layer.named_parameters())

    def test_a_time_step_is_the_position_in_the_window(self, norm: str) -> None:
        """With a state carried over, statistics begin again at step 0."""
        layer = build("lstm", norm)
        x = torch.randn(4, 3, 3, dtype=torch.float64)
        state = layer(x)[1]
        if layer.time_steps is not None:
            before = layer.norm_l0.num_batches_tracked.clone()
            layer(x[:2], state)
            change = layer.norm_l0.num_batches_tracked - before
            assert change.tolist() == [1, 1, 0]
        else:
            assert torch.equal(layer.eval()(x, state)[0], layer(x, state)[0])


def test_packed_output_can_be_packed_on() -> None:
    """A stack of layers on PackedSequence, as torch users build it."""
    first, second = (
        build("lstm", "sequence"),
        normrnn.GRU(2, 2, dtype=torch.float64, norm="sequence"),
    )
    x = torch.randn(5, 3, 3, dtype=torch.float64)
    packed = pack_padded_sequence(x, torch.tensor(LENGTHS), enforce_sorted=False)
    via_rows = second(first(packed)[0])[0]
    first, second = first.train(), second.train()
    padded = second(first(x, lengths=LENGTHS)[0], lengths=LENGTHS)[0]
    unpacked = nn.utils.rnn.pad_packed_sequence(via_rows)[0]
    close(unpacked, padded, "output", 1e-12)
