"""torch's fused kernels with ready gate inputs or folded weights, against the naive loop."""

from typing import Any

import pytest
import torch
from torch import Tensor

from normrnn.ops.fused import (
    FusedWeights,
    fused_gates,
    fused_rows,
    identity_pays,
    input_statistics,
    moments_pay,
    single_buffer,
    without_tf32,
)
from tests import reference

MODES = {"tanh": ("RNN_TANH", 1), "relu": ("RNN_RELU", 1), "lstm": ("LSTM", 4), "gru": ("GRU", 3)}
INPUT, HIDDEN, EPS = 3, 4, 1e-5
RAGGED, DENSE = (6, 6, 5, 4, 4), (5, 5, 5, 5)
"""Lengths with at least two rows at every step, which statistics of a step need."""


def drawn(cell: str, D: int, batch: int) -> dict[str, Tensor]:
    """Parameters and initial states, by the names of a state dict."""
    H, C = HIDDEN, MODES[cell][1] * HIDDEN
    p: dict[str, Tensor] = {}
    for suffix in ("", "_reverse")[:D]:
        p[f"weight_ih_l0{suffix}"] = torch.randn(C, INPUT)
        p[f"weight_hh_l0{suffix}"] = torch.randn(C, H)
        p[f"norm_l0{suffix}.weight"] = torch.rand(C) + 0.5
        p[f"norm_l0{suffix}.bias"] = torch.randn(C)
        if cell == "gru":
            p[f"bias_hn_l0{suffix}"] = torch.randn(H)
    p |= {"h": torch.randn(D, batch, H), "c": torch.randn(D, batch, H)}
    return {name: value.double().requires_grad_() for name, value in p.items()}


def expected(
    x: Tensor, lengths: tuple[int, ...], p: dict[str, Tensor], cell: Any, norm: str
) -> list[Tensor]:
    bidirectional = "weight_ih_l0_reverse" in p
    settings = reference.Settings(cell, norm, bidirectional=bidirectional, eps=EPS)
    result = reference.stack(x, lengths, p, settings, (p["h"], p["c"]))
    rows = torch.cat([result.output[t, : sizes(lengths)[t]] for t in range(len(x))])
    return [rows, result.h, *([result.c] if cell == "lstm" else [])]


def sizes(lengths: tuple[int, ...]) -> list[int]:
    return [sum(n > t for n in lengths) for t in range(max(lengths))]


def layout(lengths: tuple[int, ...]) -> dict[str, Any]:
    if len(set(lengths)) == 1:
        return {"dense": (lengths[0], len(lengths))}
    return {"batch_sizes": torch.tensor(sizes(lengths))}


def check(
    found: list[Tensor], wanted: list[Tensor], sources: list[Tensor], tol: float = 1e-10
) -> None:
    for a, e in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, e, rtol=tol, atol=tol)
    heads = [torch.randn_like(e) for e in wanted]
    grads = [torch.autograd.grad(v, sources, heads, allow_unused=True) for v in (found, wanted)]
    for a, e in zip(*grads, strict=True):
        assert (a is None) == (e is None)
        if a is not None and e is not None:
            torch.testing.assert_close(a, e, rtol=tol, atol=tol)


def case(cell: str, D: int, lengths: tuple[int, ...]) -> Any:
    p = drawn(cell, D, len(lengths))
    x = torch.randn(max(lengths), len(lengths), INPUT, dtype=torch.float64, requires_grad=True)
    rows = torch.cat([x[t, :n] for t, n in enumerate(sizes(lengths))])
    state = (p["h"], p["c"]) if cell == "lstm" else (p["h"],)
    return p, x, rows, state, ("", "_reverse")[:D]


@pytest.mark.parametrize("lengths", [RAGGED, DENSE], ids=["ragged", "dense"])
@pytest.mark.parametrize("D", [1, 2])
@pytest.mark.parametrize("cell", MODES)
def test_ready_gate_inputs(cell: str, D: int, lengths: tuple[int, ...]) -> None:
    """Frame-wise statistics in one fused call."""
    p, x, rows, state, suffixes = case(cell, D, lengths)
    gates = []
    for suffix in suffixes:
        weight, bias = p[f"norm_l0{suffix}.weight"], p[f"norm_l0{suffix}.bias"]
        steps = (rows @ p[f"weight_ih_l0{suffix}"].t()).split(sizes(lengths))
        normed = [(s - s.mean(0)) / (s.var(0, correction=0) + EPS).sqrt() for s in steps]
        gates.append(torch.cat(normed) * weight + bias)
    output, final = fused_gates(
        MODES[cell][0],
        torch.cat(gates, 1),
        [p[f"weight_hh_l0{s}"] for s in suffixes],
        [p.get(f"bias_hn_l0{s}") for s in suffixes],
        state,
        **layout(lengths),
    )
    check([output, *final], expected(x, lengths, p, cell, "frame"), [x, *p.values()])


@pytest.mark.parametrize("lengths", [RAGGED, DENSE], ids=["ragged", "dense"])
@pytest.mark.parametrize("D", [1, 2])
@pytest.mark.parametrize("cell", MODES)
def test_weights_folded_with_statistics_from_moments(
    cell: str, D: int, lengths: tuple[int, ...]
) -> None:
    p, x, rows, state, suffixes = case(cell, D, lengths)
    w_ih = torch.cat([p[f"weight_ih_l0{s}"] for s in suffixes])
    assert moments_pay(len(rows), INPUT, len(w_ih))
    mean, var = (v.chunk(D) for v in input_statistics(rows, w_ih))
    directions = []
    for d, s in enumerate(suffixes):
        scale = p[f"norm_l0{s}.weight"] / (var[d] + EPS).sqrt()
        b_hh = torch.zeros_like(scale)
        if cell == "gru":
            b_hh = torch.cat([b_hh[: 2 * HIDDEN], p[f"bias_hn_l0{s}"]])
        bias = p[f"norm_l0{s}.bias"] - scale * mean[d]
        folded = scale[:, None] * p[f"weight_ih_l0{s}"]
        directions.append(FusedWeights(folded, p[f"weight_hh_l0{s}"], bias, b_hh))
    output, final = fused_rows(MODES[cell][0], rows, directions, state, **layout(lengths))
    check([output, *final], expected(x, lengths, p, cell, "sequence"), [x, *p.values()])


@pytest.mark.parametrize(("N", "I", "C"), [(50, 3, 8), (50, 30, 8)], ids=["moments", "projection"])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_statistics_in_float32(N: int, I: int, C: int, offset: float) -> None:  # noqa: E741
    """A large mean does not spoil the variance: moments are centred."""
    x, w = torch.randn(N, I) + offset, torch.randn(C, I)
    pre = x.double() @ w.double().t()
    mean, var = input_statistics(x, w)
    tol = 1e-4 if offset else 1e-5
    torch.testing.assert_close(mean.double(), pre.mean(0), rtol=tol, atol=tol * offset + tol)
    if moments_pay(N, I, C):  # the projection itself is rounded
        torch.testing.assert_close(
            var.double(), pre.var(0, correction=0), rtol=1e-4 if offset else 1e-5, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_half_precision_are_float32(dtype: torch.dtype) -> None:
    x, w = torch.randn(50, 3).to(dtype), torch.randn(8, 3).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean, var = input_statistics(x, w)
    assert mean.dtype == var.dtype == torch.float32
    exact = x.double() @ w.double().t()
    torch.testing.assert_close(var.double(), exact.var(0, correction=0), rtol=1e-5, atol=1e-5)


def test_single_buffer_has_matrices_first_and_keeps_gradients() -> None:
    shapes = ((8, 3), (8, 2), (8,), (8,))
    directions = [
        FusedWeights(*(torch.randn(s, requires_grad=True) for s in shapes)) for _ in range(2)
    ]
    flat = single_buffer(directions)
    originals = [w for d in directions for w in d[:4] if w is not None]
    for view, original in zip(flat, originals, strict=True):
        assert torch.equal(view, original)
    assert len({view.untyped_storage().data_ptr() for view in flat}) == 1
    in_memory = sorted(range(8), key=lambda k: flat[k].storage_offset())
    assert in_memory == [0, 1, 4, 5, 2, 3, 6, 7]
    ends = [flat[k].storage_offset() + flat[k].numel() for k in in_memory]
    starts = [flat[k].storage_offset() for k in in_memory]
    assert starts == [0, *ends[:-1]]
    total = torch.stack([view.sum() for view in flat]).sum()
    for grad in torch.autograd.grad(total, originals):
        assert torch.equal(grad, torch.ones_like(grad))


def test_identity_limit() -> None:
    assert identity_pays(B=32, D=2, C=4 * 256)
    assert not identity_pays(B=32, D=2, C=4 * 1024)


def test_tf32_setting_is_restored() -> None:
    def precision() -> tuple[Any, ...]:
        settings: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn.rnn
        return tuple(setting.fp32_precision for setting in settings)

    before = precision()
    with without_tf32(torch.device("cuda")):
        assert precision() == ("ieee", "ieee")
    assert precision() == before
    with without_tf32(torch.device("cpu")):
        assert precision() == before
