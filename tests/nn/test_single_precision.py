"""The dtype people train in: every layer in float32 against the reference in float64.

Here, and only here, runs what is made for float32 on a CPU: torch's fused kernels and, where a
compiler is to be had, our own. Sizes are no multiples of a vector's width, on purpose.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import reference
from tests.helpers import CELLS, NORMS, randomise, settings_of

I, H, T = 5, 11, 9  # noqa: E741
RAGGED = [9, 3, 9, 7, 9, 3, 8, 8, 9, 9, 9, 3, 5]  # no slice has fewer than six rows
TOLERANCE = 3e-5


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest error, against the size of the numbers."""
    scale = expected.abs().max().clamp(min=1)
    return ((actual.double() - expected).abs().max() / scale).item()


def both(layer: Any, lengths: list[int], dense: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """Everything a step gives, in float32 and from the reference in float64."""
    x = torch.randn(T, len(lengths), I)
    directions = layer.num_layers * (2 if layer.bidirectional else 1)
    state = torch.randn(2, directions, len(lengths), H)
    for b, n in enumerate(lengths):
        x[n:, b] = float("nan")
    wide = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
    wide |= {n: b.clone().double() for n, b in layer.named_buffers()}
    for name, buffer in layer.named_buffers():
        if buffer.dtype == torch.int64:
            wide[name] = buffer.clone()
    own = [v.clone().requires_grad_() for v in (x, *state)]
    exact = [v.double().requires_grad_() for v in (x, *state)]

    hx: Any = (own[1], own[2]) if layer.mode == "LSTM" else own[1]
    output, final = layer(own[0], hx) if dense else layer(own[0], hx, lengths=lengths)
    finals: list[Tensor] = [*final] if isinstance(final, tuple) else [final]
    result = reference.stack(exact[0], lengths, wide, settings_of(layer), (exact[1], exact[2]))
    pairs = {"output": (output, result.output), "h_n": (finals[0], result.h)}
    if layer.mode == "LSTM":
        pairs["c_n"] = finals[1], result.c
    for k in (0, 1):
        losses = [pair[k].square().mean() + pair[k].mean() for pair in pairs.values()]
        torch.stack(losses).sum().backward()
    found: dict[str, tuple[Tensor, Tensor]] = dict(pairs)
    names = ["input", "h_0", "c_0"][: 3 if layer.mode == "LSTM" else 2]
    for name, a, e in zip(names, own, exact, strict=False):
        assert a.grad is not None
        assert e.grad is not None
        found[f"gradient of {name}"] = a.grad, e.grad
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        grad = wide[name].grad
        assert grad is not None, name
        found[f"gradient of {name}"] = parameter.grad, grad
    if layer.training:
        found |= {n: (b, result.buffers[n].double()) for n, b in layer.named_buffers()}
    return found


@pytest.mark.matrix(4)
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "ragged"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", CELLS)
def test_every_layer(cell: str, norm: str, training: bool, dense: bool) -> None:
    make, own = CELLS[cell]
    layer = make(I, H, num_layers=2, bidirectional=True, **own, **NORMS[norm])
    randomise(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(0.5)
    lengths = [T] * 13 if dense else RAGGED
    for name, (actual, expected) in both(layer.train(training), lengths, dense).items():
        assert relative(actual, expected) < TOLERANCE, name


@pytest.mark.parametrize("norm", ["sequence", "frame", "none"])
@pytest.mark.parametrize("cell", ["lstm", "lstm-all"])
@pytest.mark.parametrize("batch", [1, 2, 7, 8, 16, 17])
def test_any_width_of_a_step(cell: str, norm: str, batch: int) -> None:
    """Widths below, at and above a vector's, with every sequence of another length."""
    make, own = CELLS[cell]
    layer = make(I, H, bidirectional=True, **own, **NORMS[norm]).eval()
    randomise(layer)
    lengths = [1 + (3 * b) % T for b in range(batch)]
    lengths[-1] = T
    for name, (actual, expected) in both(layer, lengths, dense=False).items():
        assert relative(actual, expected) < TOLERANCE, name
