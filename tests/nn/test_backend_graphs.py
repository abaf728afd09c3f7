"""Graphs that were traced with one backend and run with another."""

from pathlib import Path
from typing import Any

import pytest
import torch

import normrnn
from normrnn.ops.backend import choice


@pytest.mark.parametrize("norm", ["frame", "layer"])
def test_a_saved_training_graph_runs_with_every_backend(norm: Any, tmp_path: Path) -> None:
    layer, x = normrnn.LSTM(3, 4, norm=norm), torch.randn(5, 6, 3)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "layer.pt2")
    graph = torch.export.load(tmp_path / "layer.pt2").module()
    expected, _ = layer(x)
    (wanted,) = torch.autograd.grad(expected.square().sum(), [layer.weight_hh_l0])
    for name in ("auto", "loop"):
        with normrnn.backend(name):
            with torch.no_grad():
                torch.testing.assert_close(graph(x)[0], expected)
            output = graph(x)[0]
            (found,) = torch.autograd.grad(
                output.square().sum(), [graph.get_parameter("weight_hh_l0")]
            )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_backward_pass_with_another_backend() -> None:
    layer, x = normrnn.LSTM(3, 4, norm="frame"), torch.randn(5, 6, 3)
    (wanted,) = torch.autograd.grad(layer(x)[0].square().sum(), [layer.weight_hh_l0])
    output = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)[0]
    with normrnn.backend("loop"):
        (found,) = torch.autograd.grad(output.square().sum(), [layer.weight_hh_l0])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_backend_can_be_entered_twice() -> None:
    with normrnn.backend("loop") as _:
        pass
    block = normrnn.backend("loop")
    for _ in range(2):
        with block:
            assert choice.selected == "loop"
        assert choice.selected == "auto"
