"""Layers before torch's tracers, each beside the same layer run eagerly.

``python -m tests.traced TOOL:CELL:NORM…``: a process of its own, since what a tracer is handed by
mistake can end one. Prints a line for every case that held.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.functional import jacobian

from tests.helpers import HIDDEN, INPUT, build

T, B = 5, 4


def close(actual: Any, expected: Any, what: str, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}"
    )


def flat(result: Any) -> list[Tensor]:
    """The output and the parts of the final state."""
    output, final = result
    return [output, *(final if isinstance(final, tuple) else (final,))]


def pulled(results: list[Tensor]) -> Tensor:
    """A loss that everything counts in."""
    return torch.stack([(r * r).sum() for r in results]).sum()


def check_pair(layer: Any, twin: Any, tried: Callable[..., Any], *batches: Any) -> None:
    """Outputs, gradients of inputs and parameters, and buffers, after all batches."""
    for x, lengths in batches:
        leaves = [x.clone().requires_grad_(), x.clone().requires_grad_()]
        how = [{} if lengths is None else {"lengths": lengths}] * 2
        results = [flat(f(v, **h)) for f, v, h in zip((tried, twin), leaves, how, strict=True)]
        for k, (a, b) in enumerate(zip(*results, strict=True)):
            close(a, b, f"result {k}")
        for r in results:
            pulled(r).backward()
        close(leaves[0].grad, leaves[1].grad, "gradient of the input", 1e-3)
    for (name, p), q in zip(layer.named_parameters(), twin.parameters(), strict=True):
        assert q.grad is not None, name
        close(p.grad, q.grad, name, 1e-3)
    for (name, p), q in zip(layer.named_buffers(), twin.buffers(), strict=True):
        close(p, q, name)


def batches(ragged: bool) -> list[tuple[Tensor, Tensor | None]]:
    lengths = [[3, 5, 2, 5], [8, 8, 4, 3, 7], [5, 0, 2, 5]] if ragged else [None, None]
    shapes = [(T, B), (9, 5), (6, 4)] if ragged else [(T, B), (9, 7)]
    return [
        (torch.randn(*shape, INPUT), None if n is None else torch.tensor(n))
        for shape, n in zip(shapes, lengths, strict=True)
    ]


def compiled(layer: Any, backend: str = "aot_eager", ragged: bool = False) -> None:
    twin = copy.deepcopy(layer)
    torch.compiler.reset()
    tried: Any = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    check_pair(layer, twin, tried, *batches(ragged))


def compiled_ragged(layer: Any) -> None:
    compiled(layer, ragged=True)


def inductor(layer: Any) -> None:
    compiled(layer, "inductor")


def needs_normrnn(program: torch.export.ExportedProgram) -> bool:
    return any(str(node.target).startswith("normrnn.") for node in program.graph.nodes)


def exported(layer: Any, ragged: bool = False) -> None:
    """For any T and B; in training with the buffers' updates, else without our operators."""
    layer.requires_grad_(False)
    twin, t, b = copy.deepcopy(layer), torch.export.Dim("t"), torch.export.Dim("b")
    shapes: Any = {"input": {0: t, 1: b}} | ({"lengths": {0: b}} if ragged else {})
    given = {"lengths": torch.tensor([3, 5, 2, 5])} if ragged else {}
    example = (torch.randn(T, B, INPUT),)
    program = torch.export.export(layer, example, given, dynamic_shapes=shapes)
    assert needs_normrnn(program) == layer.training
    module, y = program.module(), torch.randn(9, 5, INPUT)
    given = {"lengths": torch.tensor([8, 8, 4, 3, 9])} if ragged else {}
    results = flat(module(y, **given)), flat(twin(y, **given))
    for k, (one, other) in enumerate(zip(*results, strict=True)):
        close(one, other, f"result {k}")
    ours = dict(module.named_buffers())
    for name, buffer in twin.named_buffers():
        close(ours[name], buffer, name)


def exported_ragged(layer: Any) -> None:
    exported(layer, ragged=True)


def faked(layer: Any) -> None:
    """No numbers are computed, and no memory is touched that is not there."""
    before = {name: b.clone() for name, b in layer.named_buffers()}
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.randn(T, B, INPUT, requires_grad=True)
        for given in ({}, {"lengths": torch.tensor([3, 5, 2, 5])}):
            results = flat(layer(x, **given))
            assert all(isinstance(r, FakeTensor) for r in results)
            assert results[0].shape == (T, B, layer.directions * HIDDEN)
            pulled(results).backward()
        assert isinstance(x.grad, FakeTensor)
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name]), name


def transformed(layer: Any) -> None:
    """torch.func.grad of functional_call, also of a gradient."""
    twin, x = copy.deepcopy(layer), torch.randn(T, B, INPUT)
    values = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return pulled(flat(torch.func.functional_call(layer, values, (x,))))

    grads = torch.func.grad(loss)(values, x)
    pulled(flat(twin(x))).backward()
    for name, parameter in twin.named_parameters():
        close(grads[name], parameter.grad, name, 1e-3)
    for (name, one), other in zip(layer.named_buffers(), twin.buffers(), strict=True):
        close(one, other, name)
    slope = torch.func.grad(lambda x: torch.func.grad(loss, 1)(values, x).square().sum())(x)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(pulled(flat(layer(leaf))), leaf, create_graph=True)
    close(slope, torch.autograd.grad(first.square().sum(), leaf)[0], "second derivative", 1e-2)


def differentiated(layer: Any) -> None:
    """Jacobians of all entries at once, and of every sample by itself."""
    x = torch.randn(T, B, INPUT)

    def f(x: Tensor) -> Tensor:
        return layer(x)[0].sum((0, 2))

    wanted = jacobian(f, x)
    close(jacobian(f, x, vectorize=True), wanted, "vectorised")
    close(torch.func.jacrev(f)(x), wanted, "jacrev")
    if layer.training and any("running" in name for name, _ in layer.named_buffers()):
        return  # many batches at once have no one order to update buffers in

    def one(x: Tensor) -> Tensor:
        return layer(x)[0].square().sum()

    each = torch.func.vmap(torch.func.grad(one))(torch.stack([x, x + 1]))
    close(each, torch.stack([torch.func.grad(one)(v) for v in (x, x + 1)]), "vmap of grad")


TOOLS: dict[str, Callable[[Any], None]] = {
    f.__name__: f
    for f in (
        *(compiled, compiled_ragged, inductor, exported, exported_ragged),
        *(faked, transformed, differentiated),
    )
}


def main(*cases: str) -> None:
    for case in cases:
        tool, cell, norm = case.split(":")
        for training in (True, False):
            torch.manual_seed(1)
            layer = build(cell, norm, dtype=torch.float32, num_layers=2, bidirectional=True)
            TOOLS[tool](layer.train(training))
            print(f"{case} {'train' if training else 'eval'}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
