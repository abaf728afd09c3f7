"""The Triton kernels of norm="layer" against the naive loop in float64."""

import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from normrnn.ops import Steps

pytest.importorskip("triton", reason="the Triton kernels need the extra [gpu]")

from normrnn.ops import triton_layer as kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _without_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test makes its own comparisons."""
    monkeypatch.setattr(kernels, "self_check", lambda *_: None)


def drawn_case(seed: int) -> dict[str, Any]:
    """Sizes and options drawn with a seed; hidden sizes up to the limit, few of them large."""
    draw = random.Random(seed)
    H = draw.choice([draw.randint(1, 20), draw.randint(21, 70), draw.randint(71, 256)])
    B, T = draw.choice([1, 2, 5, 16, 17, 33]), draw.randint(1, 6)
    lengths = sorted((draw.randint(1, T) for _ in range(B)), reverse=True)
    if draw.random() < 0.3:
        lengths = [T] * B
    return {
        "H": H,
        "lengths": tuple(lengths),
        "bidirectional": draw.random() < 0.5,
        "cell_norm": draw.random() < 0.4,
        "with_state": draw.random() < 0.7,
        "with_resets": draw.random() < 0.5,
        "affine": draw.random() < 0.8,
        "seed": seed,
    }


@pytest.mark.matrix(30)
@pytest.mark.parametrize("seed", range(100))
def test_outputs_and_all_gradients(seed: int) -> None:
    case = drawn_case(seed)
    errors = kernels.compare_with_reference(DEVICE, case.pop("H"), **case)
    assert {n: e for n, e in errors.items() if not e <= TOLERANCE} == {}


def test_drawn_cases_cover_every_option() -> None:
    cases = [drawn_case(seed) for seed in range(100)]
    for option in ("bidirectional", "cell_norm", "with_state", "with_resets", "affine"):
        assert {case[option] for case in cases} == {True, False}, option
    assert max(case["H"] for case in cases) > 128
    assert any(len(set(case["lengths"])) > 1 and len(case["lengths"]) > 16 for case in cases)


def inputs(H: int = 5) -> dict[str, Any]:
    return {
        "gates": torch.randn(7, 4 * H, device=DEVICE, requires_grad=True),
        "w_hh": torch.randn(1, 4 * H, H, device=DEVICE, requires_grad=True),
        "gamma": torch.rand(1, 4 * H, device=DEVICE, requires_grad=True),
        "steps": Steps((3, 3, 1)),
    }


def test_half_precision_weights() -> None:
    errors = kernels.compare_with_reference(DEVICE, 16, dtype=torch.float16)
    assert max(errors.values()) < 1e-2


def test_without_gradients_outputs_are_the_same() -> None:
    given = inputs()
    rows, state = kernels.layer_lstm(**given)
    with torch.no_grad():
        again, last = kernels.layer_lstm(**given)
    assert torch.equal(rows, again)
    assert torch.equal(state[1], last[1])
    assert not again.requires_grad


def test_gradient_of_the_final_state_alone() -> None:
    """Sequences that end early take no gradient from later rows."""
    given = inputs()
    _, (h, _) = kernels.layer_lstm(**given)
    (found,) = torch.autograd.grad(h[0, 0].sum(), given["gates"])
    own = torch.tensor([0, 3, 6], device=DEVICE)  # rows of sequence 0
    assert (found[own].abs().sum(1) > 0).all()
    others = [n for n in range(7) if n not in (0, 3, 6)]
    assert torch.equal(found[others], torch.zeros_like(found[others]))


def test_backward_direction_alone() -> None:
    """Equal to the second of two directions."""
    H, steps = 5, Steps((3, 3, 1))
    gates, w_hh = torch.randn(7, 8 * H, device=DEVICE), torch.randn(2, 4 * H, H, device=DEVICE)
    h0, c0 = torch.randn(2, 2, 3, H, device=DEVICE)
    resets = torch.tensor([0, 0, 1, 0, 1, 0, 1], device=DEVICE)
    sources = [t.requires_grad_() for t in (gates, w_hh, h0, c0)]
    both, _ = kernels.layer_lstm(
        gates, w_hh, None, steps, state=(h0, c0), resets=resets, reverse=(False, True)
    )
    alone, _ = kernels.layer_lstm(
        gates[:, 4 * H :],
        w_hh[1:],
        None,
        steps,
        state=(h0[1:], c0[1:]),
        resets=resets,
        reverse=(True,),
    )
    torch.testing.assert_close(alone, both[:, H:])
    head = torch.randn_like(alone)
    expected = torch.autograd.grad(both[:, H:], sources, head)
    torch.testing.assert_close(torch.autograd.grad(alone, sources, head), expected)


def test_operator_registration() -> None:
    """torch's own checks of schema, fake kernel and autograd."""
    given = inputs(4)
    zeros = torch.zeros(1, 3, 4, device=DEVICE)
    lengths = torch.tensor([3, 2, 2], dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([0, 3, 6, 7], device=DEVICE)
    args = (given["gates"], given["w_hh"], given["gamma"], zeros, zeros, None, None, None)
    torch.library.opcheck(
        torch.ops.normrnn.layer_lstm.default,
        (*args, lengths, offsets, 1e-5, False, True),
        atol=1e-4,
        rtol=1e-4,
    )


def test_compiles_to_one_graph() -> None:
    given = inputs()

    def loss(gates: torch.Tensor) -> torch.Tensor:
        return kernels.layer_lstm(gates, given["w_hh"], given["gamma"], given["steps"])[0].sum()

    expected = torch.autograd.grad(loss(given["gates"]), given["gates"])
    traced = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(traced(given["gates"]), given["gates"])
    torch.testing.assert_close(found, expected)


def test_second_derivative_is_refused() -> None:
    given = inputs()
    rows, _ = kernels.layer_lstm(**given)
    (first,) = torch.autograd.grad(rows.sum(), given["gates"], create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(first.sum(), given["w_hh"])


@pytest.mark.parametrize(
    "changed",
    [
        {"w_hh": torch.zeros(1, 4 * 257, 257), "gates": torch.zeros(7, 4 * 257)},
        {"gates": torch.zeros(6, 20)},
        {"gates": torch.zeros(7, 20, dtype=torch.float64)},
        {"reverse": (False, True)},
        {"steps": Steps((2, 1))},
    ],
    ids=["hidden units", "rows", "float64", "directions", "steps"],
)
def test_wrong_arguments_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        kernels.layer_lstm(**{**inputs(), **changed})


def test_first_use_compares_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that differs from the reference is refused, an equal one checked once."""
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "_checked", set())
    true_loop = kernels.loop
    with monkeypatch.context() as wrong:
        wrong.setattr(kernels, "loop", lambda *a: (r := true_loop(*a))._replace(rows=r.rows * 1.01))
        with pytest.raises(RuntimeError, match="differs"):
            kernels.layer_lstm(**inputs())
    kernels.layer_lstm(**inputs())
    with monkeypatch.context() as counted:
        counted.setattr(kernels, "compare_with_reference", lambda *_, **__: pytest.fail("again"))
        kernels.layer_lstm(**inputs())


@pytest.mark.slow
def test_compiles_without_spills_up_to_128() -> None:
    """As `python -m benchmarks.gpu --compile-only` prints it."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--compile-only", "--hidden", "64,128"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    table = [line.split("|")[1:-1] for line in done.stdout.splitlines() if "sm_" in line]
    assert len(table) == 8
    assert {int(line[5]) for line in table} == {0}
