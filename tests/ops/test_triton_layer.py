"""The Triton kernels of norm="layer" against the loop in float64."""

import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

import normrnn
from normrnn.ops import Steps, recur

kernels: Any = pytest.importorskip(
    "normrnn.ops.triton_layer", reason="the Triton kernels need the extra [gpu]"
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _without_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test makes its own comparisons."""
    monkeypatch.setattr(kernels, "self_check", lambda *_: None)


def drawn_case(seed: int) -> tuple[Any, Steps, Any]:
    """Sizes and options drawn with a seed; hidden sizes up to the limit, few of them large."""
    draw = random.Random(seed)
    H = draw.choice([draw.randint(1, 20), draw.randint(21, 70), draw.randint(71, 256)])
    B, T = draw.choice([1, 2, 5, 16, 17, 33]), draw.randint(1, 6)
    sizes = sorted((draw.randint(1, B) for _ in range(T)), reverse=True)
    sizes = [B] * T if draw.random() < 0.3 else [B, *sizes[1:]]
    reverse = draw.choice([(False,), (True,), (False, True), (False, True)])
    call = kernels.random_call(H, Steps(sizes), reverse, seed)
    absent = {
        **({} if draw.random() < 0.7 else {"h0": None, "c0": None}),
        **({} if draw.random() < 0.5 else {"resets": None}),
        **({} if draw.random() < 0.8 else {"weight": None, "bias": None, "gamma_hh": None}),
    }
    return *call[:2], call[2]._replace(**absent)


@pytest.mark.matrix(20)
@pytest.mark.parametrize("seed", range(100))
def test_outputs_and_all_gradients(seed: int) -> None:
    errors = kernels.differences(*drawn_case(seed), DEVICE)
    assert {n: e for n, e in errors.items() if not e <= kernels.TOLERANCE} == {}


def layer_and_input(**options: Any) -> tuple[Any, torch.Tensor]:
    layer = normrnn.LSTM(3, 5, **{"norm": "layer", "bidirectional": True, **options})
    return layer.to(DEVICE), torch.randn(4, 3, 3, device=DEVICE)


def gradients(layer: Any, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    output, (h, c) = layer(x, **options)
    loss = output.square().sum() + h.sum() + c.sum()
    return [output, *torch.autograd.grad(loss, list(layer.parameters()))]


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "affine": False}], ids=str)
def test_a_layer_takes_the_backend(options: dict[str, Any]) -> None:
    layer, x = layer_and_input(**options)
    for more in ({}, {"lengths": [4, 1, 2]}):
        expected = gradients(layer, x, **more)
        with normrnn.backend("triton"):
            found = gradients(layer, x, **more)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_half_precision(dtype: torch.dtype) -> None:
    layer, x = layer_and_input()
    expected = gradients(layer, x)
    with normrnn.backend("triton"), torch.autocast(DEVICE.type, dtype):
        found = gradients(layer, x)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
    with normrnn.backend("triton"):
        output = layer.to(dtype)(x.to(dtype))[0]
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected[0], rtol=0.1, atol=0.1)


def test_second_derivatives_are_the_loops() -> None:
    layer, x = layer_and_input()
    found = []
    for backend in ("loop", "triton"):
        with normrnn.backend(backend):  # type: ignore[arg-type]
            output = layer(x)[0]
        (first,) = torch.autograd.grad(output.sum(), [layer.weight_hh_l0], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [layer.weight_ih_l0])[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_gradient_of_the_final_state_alone() -> None:
    """Sequences that end early take no gradient from later rows."""
    steps = Steps((3, 3, 1))
    spec, _, tensors = kernels.random_call(5, steps, (False,))
    own = tensors._replace(resets=None, x=tensors.x.float().to(DEVICE).requires_grad_())
    own = type(own)(*(t if t is None or t is own.x else t.float().to(DEVICE) for t in own))
    with normrnn.backend("triton"):
        h = recur(spec, steps, own).state[0]
    (found,) = torch.autograd.grad(h[0, 0].sum(), [own.x])
    rows = torch.tensor([0, 3, 6], device=DEVICE)  # of sequence 0
    assert (found[rows].abs().sum(1) > 0).all()
    others = [n for n in range(7) if n not in (0, 3, 6)]
    assert torch.equal(found[others], torch.zeros_like(found[others]))


def test_operator_registration() -> None:
    """torch's own checks of schema, fake kernel and autograd."""
    H, N = 4, 7
    zeros = torch.zeros(1, 3, H, device=DEVICE)
    args = (
        torch.randn(N, 4 * H, device=DEVICE, requires_grad=True),
        torch.randn(1, 4 * H, H, device=DEVICE, requires_grad=True),
        torch.rand(1, 4 * H, device=DEVICE, requires_grad=True),
        *(zeros, zeros, None),
        torch.tensor([3, 2, 2], dtype=torch.int32, device=DEVICE),
        torch.tensor([0, 3, 6, 7], device=DEVICE),
    )
    operator = torch.ops.normrnn.layer_lstm.default
    torch.library.opcheck(operator, (*args, 1e-5, False, True), atol=1e-4, rtol=1e-4)


def test_compiles_to_one_graph() -> None:
    layer, x = layer_and_input()
    expected = gradients(layer, x)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with normrnn.backend("triton"):
        output, (h, c) = compiled(x)
    loss = output.square().sum() + h.sum() + c.sum()
    found = [output, *torch.autograd.grad(loss, list(layer.parameters()))]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"norm": "frame"}, "'layer'"),
        ({"norm": None}, "'layer'"),
        ({"peephole": "all"}, "peepholes"),
        ({"cell_norm": True}, "cell_norm"),
        ({"zoneout": (0.1, 0.0)}, "zoneout"),
        ({"proj_size": 2}, "projection"),
        ({"hidden_size": 257}, "257"),
        ({"dtype": torch.float64}, "float64"),
        ({"device": "meta"}, "meta"),
    ],
    ids=str,
)
def test_calls_that_it_cannot_run(options: dict[str, Any], value: str) -> None:
    layer = normrnn.LSTM(**{"input_size": 3, "hidden_size": 5, "norm": "layer", **options})
    like = layer.weight_hh_l0
    x = torch.zeros(4, 3, 3, dtype=like.dtype, device=like.device)
    with normrnn.backend("triton"), pytest.raises(RuntimeError, match=value):
        layer(x)


def test_other_cells() -> None:
    layer, x = normrnn.GRU(3, 5, norm="layer"), torch.zeros(4, 3, 3)
    with normrnn.backend("triton"), pytest.raises(RuntimeError, match="GRU"):
        layer(x)


def test_first_use_compares_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that differs from the loop is refused, an equal one checked once."""
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "_checked", set())
    layer, x = layer_and_input()
    exact = kernels.loop
    with monkeypatch.context() as wrong, normrnn.backend("triton"):
        wrong.setattr(kernels, "loop", lambda *a: (r := exact(*a))._replace(rows=r.rows * 1.01))
        with pytest.raises(RuntimeError, match="output"):
            layer(x)
    with normrnn.backend("triton"):
        layer(x)
        monkeypatch.setattr(kernels, "differences", lambda *_: pytest.fail("again"))
        layer(x)


@pytest.mark.slow
def test_compiles_without_spills_up_to_128() -> None:
    """As `python -m benchmarks.gpu --compile-only` prints it."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--compile-only", "--hidden", "64,128"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    table = [line.split("|")[1:-1] for line in done.stdout.splitlines() if "sm_" in line]
    assert len(table) == 8
    assert {int(line[5]) for line in table} == {0}
