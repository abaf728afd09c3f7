"""The operators themselves: what torch asks of one, and every gradient twice."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from normrnn.ops.call import Tensors
from normrnn.ops.layout import Traced
from normrnn.ops.loop import loop
from normrnn.ops.native.library import describe
from normrnn.ops.operators import arguments
from tests.kernel_cases import (
    Case,
    as_type,
    check,
    native,
    pairs,
    problem,
    second_derivatives,
    tensors_of,
)

CASES = [
    Case("LSTM", "sequence", (4, 4), (False, True), 3, 5, peephole="ifo"),
    Case("GRU", "frame slots", (4, 3, 1), (True,), 3, 5),
    Case("RNN_TANH", "step", (4, 3), inputs=0, hidden=5, state=False),
    Case("LSTM", "row cell", (4, 4, 2), inputs=3, hidden=5),
    Case("GRU", "plain", (4, 4), (False, True), 3, 5, affine=False),
    Case("LSTM", "frame", (4, 4, 4), (False, True), 3, 5, zoneout="masks hc", resets=True),
    Case("RNN_TANH", "plain", (4, 3), (True,), 3, 5, zoneout="shares h"),
]

ZONES = "masks hc", "", "shares hc"


def given(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """What an operator takes."""
    tensors = as_type(tensors_of(case), dtype)
    return arguments(*problem(case, tensors))


def of_backward(case: Case, args: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor], list[bool]]:
    """What the backward pass takes besides: all but the final state, gradients, what is wanted."""
    made = [t.detach() for t in torch.ops.normrnn.recur(*args, True)]
    parts = 2 if case.mode == "LSTM" else 1
    grads = [torch.randn_like(out) for out in made[: 1 + parts]]
    wanted = [t is not None and t.requires_grad for t in args[0]]
    return [made[0], *made[1 + parts :]], grads, wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_torch_asks_of_an_operator(case: Case, dtype: torch.dtype) -> None:
    args = given(case, dtype)
    opcheck(torch.ops.normrnn.recur.default, (*args, True))
    opcheck(
        torch.ops.normrnn.recur_backward.default,
        (*args, *of_backward(case, args)),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_what_torch_asks_of_those_that_change_buffers() -> None:
    mean, var, tracked = torch.zeros(3), torch.ones(3), torch.tensor(0)
    batch = torch.randn(1, 3), torch.rand(1, 3), torch.full((1,), 8.0)
    opcheck(torch.ops.normrnn.update_.default, (mean, var, tracked, *batch, 0.1))
    slots = torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
    steps = torch.randn(4, 3), torch.rand(4, 3), torch.full((4,), 8.0)
    opcheck(torch.ops.normrnn.update_.default, (*slots, *steps, None))
    opcheck(torch.ops.normrnn.store_.default, (torch.zeros(3), torch.ones(3)))


@pytest.mark.skipif(describe()["kernels"] == "torch", reason="no kernels here")
@pytest.mark.parametrize("sizes", [(4, 3, 3, 2, 0), (3, 3, 1, 1, 1)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_padded_rows_are_not_looked_at(case: Case, sizes: tuple[int, ...]) -> None:
    """All T·B rows, NaN among them, give what the frames alone give; fewer sequences may begin."""
    T, B = len(sizes), 4
    case = replace(case, sizes=tuple(n for n in sizes if n))
    tensors = {n: t.detach() for n, t in tensors_of(case).items()}
    alive = torch.arange(B) < torch.tensor(sizes)[:, None]
    wide = dict(tensors)
    for name in {"x", "kept_h", "kept_c", "resets"} & wide.keys():
        if len(wide[name]) == sum(case.sizes):
            bad = float("nan") if name == "x" else True
            wide[name] = torch.full((T * B, *wide[name].shape[1:]), bad)
            wide[name][alive.flatten()] = tensors[name]
    for name in ("h0", "c0"):
        if name in wide:
            more = torch.randn(len(case.reverse), B - case.sizes[0], case.hidden)
            wide[name] = torch.cat([tensors[name], more], 1)
    if "mean" in wide and len(wide["mean"]) > 1:
        for name in ("mean", "var"):
            wide[name] = torch.cat([wide[name], wide[name][-1:].expand(T - len(wide[name]), -1)])
    wanted = native(*problem(case, tensors))
    spec, _, flat = problem(replace(case, sizes=(B,) * T), wide)
    steps = Traced(T, B, T * B, torch.tensor(sizes), is_padded=True)
    rows, *rest = torch.ops.normrnn.recur(*arguments(spec, steps, flat), False)
    state, statistics = rest[: spec.states], rest[-1] if spec.batch else None
    assert torch.equal(rows[alive.flatten()], wanted.rows)
    assert not rows[~alive.flatten()].any()
    for k, (part, own) in enumerate(zip(state, wanted.state, strict=True)):
        assert torch.equal(part[:, : case.sizes[0]], own)
        start = wide.get(("h0", "c0")[k])
        rest = torch.zeros_like(part) if start is None else start
        assert torch.equal(part[:, case.sizes[0] :], rest[:, case.sizes[0] :])
    if statistics is not None:
        assert wanted.statistics is not None
        groups = len(wanted.statistics.mean)
        assert torch.equal(statistics[0, :groups], wanted.statistics.mean)
        assert not statistics[:, groups:].any()


@pytest.mark.skipif(describe()["kernels"] == "torch", reason="no kernels here")
@pytest.mark.matrix(2)
@pytest.mark.parametrize(("mode", "norm"), pairs("LSTM", "GRU", "RNN_TANH"))
def test_second_derivatives_are_the_loops(mode: str, norm: str) -> None:
    """From C's first ones, by every leaf, ragged, from all outputs."""
    case = Case(mode, norm, (9, 9, 6, 6), (False, True), 3, 5, peephole="ifo", seed=7)
    case = replace(case, zoneout=ZONES[len(norm) % 3])
    tensors = tensors_of(case)
    found = second_derivatives(case, tensors, native)
    wanted = second_derivatives(case, as_type(tensors, torch.float64), loop)
    check(found, wanted, 2e-3, least=1e-2)


EVERYTHING = [
    Case("LSTM", "frame slots", (4, 4, 2), (False, True), peephole="ifo", zoneout="masks hc"),
    Case("GRU", "recurrent slots", (4, 4), (True,), resets=True),
    Case("LSTM", "row cell", (4, 3), inputs=0, zoneout="shares hc"),
    Case("RNN_TANH", "step", (4, 4, 1), (False, True), state=False),
    Case("GRU", "sequence fixed", (1,)),
]


def spoilt_tensors(tensors: list[Any]) -> Iterator[tuple[int, Any]]:
    """Every tensor in turn: of another shape, type or device, or missing."""
    for k, t in enumerate(tensors):
        if t is None:
            continue
        t = t.detach()
        for bad in (t[..., :-1], t[None], t.new_zeros(()), t.new_zeros(0), t[:0], t.long()):
            yield k, bad
        yield k, t.to("meta")
        if t.shape[0] > 1:
            yield k, t[:-1]
    for required in (0, Tensors._fields.index("w_hh")):  # the input and a recurrent weight
        yield required, None


def spoilt_arguments(args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    tensors, sizes, time, batch, mode, reverse, kind, eps, per_step, *flags = args
    rest, norm = (tensors, sizes, time, batch), (kind, eps, per_step, *flags)
    alive = [batch] * time if sizes is None else sizes.tolist()
    for wrong in ([*alive[:-1], 99], [-1] * time, [batch + 1] * time, [0, *alive[1:]], alive[:-1]):
        if any(wrong) or not wrong:
            yield tensors, torch.tensor(wrong), *args[2:]
    yield tensors, torch.tensor(alive, dtype=torch.int32), *args[2:]
    yield tensors, torch.tensor(alive, dtype=torch.float32), *args[2:]
    for T, B in ((time + 1, batch), (time, batch + 1), (-time, -batch), (0, 0), (10**15, batch)):
        yield tensors, sizes, T, B, *args[4:]
    for other in ("LSTM", "GRU", "RNN_TANH", "GELU", ""):
        if other != mode:
            yield *rest, other, reverse, *norm
    for other in ([], [False] * 3, [True] * (3 - len(reverse))):
        yield *rest, mode, other, *norm
    yield *rest, mode, reverse, "absent", *norm[1:]
    for value in (float("nan"), float("inf"), -1.0):
        yield *rest, mode, reverse, kind, value, per_step, *flags
    if kind != "input":
        yield *rest, mode, reverse, kind, eps, not per_step, *flags
    for count in (0, 1, len(tensors) - 1):
        yield tensors[:count], *args[1:]
    yield [*tensors, None], *args[1:]


@pytest.mark.parametrize("case", EVERYTHING, ids=str)
def test_operators_refuse_invalid_arguments(case: Case) -> None:
    """Called directly, with whatever: an exception, never a read of foreign memory."""
    args = given(case)
    wrong = list(spoilt_arguments(args))
    for k, bad in spoilt_tensors(args[0]):
        tensors = list(args[0])
        tensors[k] = bad
        wrong.append((tensors, *args[1:]))
    saved, grads, wanted = of_backward(case, args)
    for bad in wrong:
        with pytest.raises(ValueError):
            torch.ops.normrnn.recur(*bad, False)
        with pytest.raises(ValueError):
            torch.ops.normrnn.recur_backward(*bad, saved, grads, wanted)
    of_backward_pass: list[tuple[str, Any]] = [("outputs", ([], grads, wanted))]
    for k, t in enumerate(saved):
        for bad in (t[..., :-1], t.double(), t.to("meta"), t[None]):
            own = [*saved[:k], bad, *saved[k + 1 :]]
            of_backward_pass.append(("outputs", (own, grads, wanted)))
    for k, grad in enumerate(grads):
        for bad in (grad[..., :-1], grad.double(), grad.to("meta")):
            own = [*grads[:k], bad, *grads[k + 1 :]]
            of_backward_pass.append(("gradients", (saved, own, wanted)))
    for flags in (wanted[:-1], [*wanted, True], [True] * len(wanted)):
        of_backward_pass.append(("gradient", (saved, grads, flags)))
    for match, rest in of_backward_pass:
        with pytest.raises(ValueError, match=match):
            torch.ops.normrnn.recur_backward(*args, *rest)


def spread(t: Tensor | None) -> Tensor | None:
    """The same values, not side by side."""
    return None if t is None else torch.stack([t, t], -1)[..., 0]


def negative(t: Tensor | None) -> Tensor | None:
    """The same values, whose memory has the opposite ones."""
    return torch._neg_view(-t) if t is not None and t.is_floating_point() else t


@pytest.mark.parametrize("other", [spread, negative])
@pytest.mark.parametrize("case", EVERYTHING, ids=str)
@torch.no_grad()
def test_operators_take_any_strides(case: Case, other: Any) -> None:
    args = given(case)
    made, (saved, grads, wanted) = torch.ops.normrnn.recur(*args, False), of_backward(case, args)
    first = torch.ops.normrnn.recur_backward(*args, saved, grads, wanted)
    own = [other(t) for t in args[0]], *args[1:]
    torch.testing.assert_close(torch.ops.normrnn.recur(*own, False), made)
    rest = [other(t) for t in saved], [other(t) for t in grads], wanted
    torch.testing.assert_close(torch.ops.normrnn.recur_backward(*own, *rest), first)


def test_those_that_change_buffers_refuse_invalid_arguments() -> None:
    mean, var, tracked = torch.zeros(3), torch.ones(3), torch.tensor(0)
    batch = torch.randn(2, 3), torch.rand(2, 3), torch.full((2,), 8.0)
    valid = mean, var, tracked, *batch
    for k, t in enumerate(valid):
        for bad in (t.new_zeros(4), t.new_zeros(2, 4), t.new_zeros(1, 1), t[None]):
            with pytest.raises(ValueError, match="statistics"):
                torch.ops.normrnn.update_(*valid[:k], bad, *valid[k + 1 :], 0.1)
    for inputs in (-1, 4, 10**9):
        with pytest.raises(ValueError, match="statistics"):
            torch.ops.normrnn.update_(*valid, 0.1, inputs)
    with pytest.raises(ValueError, match="shape"):
        torch.ops.normrnn.store_(mean, torch.zeros(1))
    assert not mean.any()
