"""The recurrence as operators of torch: ``torch.ops.normrnn.recur`` and its way back.

By the compiled kernels where they serve, else by :mod:`normrnn.ops.loop`, in any type and on any
device; with kernels for fake tensors, so that compilers and exporters see one node with sizes
that may vary. :mod:`normrnn.ops.kernel` differentiates them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.ops.call import GATES
from normrnn.ops.check import check_flat, check_given, check_tensors
from normrnn.ops.flat import (
    C0,
    FIRST,
    H0,
    KEPT_C,
    KEPT_H,
    OF_A_CELL,
    RESETS,
    Flat,
    Spec,
    X,
    restored,
)
from normrnn.ops.loop import loop
from normrnn.ops.native.kernel import NORMS, backward, forward, kept_floats
from normrnn.ops.native.library import library
from normrnn.ops.padded import Frames
from normrnn.ops.statistics import wide
from normrnn.ops.steps import Steps, Traced

_ABOUT = "Tensor?[] tensors, Tensor? sizes, SymInt time, SymInt batch, "
_ABOUT += "str mode, bool[] reverse, str plug, float[] numbers"
_OPS = torch.library.Library("normrnn", "DEF")
_OPS.define(f"recur({_ABOUT}, bool keep) -> Tensor[]")
_OPS.define(f"recur_backward({_ABOUT}, Tensor[] made, Tensor?[] grads, bool[] wanted) -> Tensor[]")


def is_compiled(spec: Spec, tensors: Flat) -> bool:
    """Whether C computes it: a plug that it knows, and float32 of a CPU throughout.

    The tensors have been checked, so none of them is empty if the weights are not.
    """
    if spec.plug not in NORMS or library() is None:
        return False
    first = spec.first_cell
    w_ih, w_hh, projection = tensors[first], tensors[first + 1], tensors[first + OF_A_CELL - 1]
    assert w_hh is not None
    if projection is not None or 0 in w_hh.shape or (w_ih is not None and 0 in w_ih.shape):
        return False
    for k, t in enumerate(tensors):
        if t is None:
            continue
        if not t.is_cpu or t.layout != torch.strided:
            return False
        if k == RESETS or t.dtype == torch.float32:
            continue
        if k not in (KEPT_H, KEPT_C) or t.dtype != torch.bool:
            return False
    return _zones(*tensors[KEPT_H:FIRST])


def _zones(h: Tensor | None, c: Tensor | None) -> bool:
    """Whether C knows such a zoneout: masks for both, or shares that are those of all rows."""
    given = [t for t in (h, c) if t is not None]
    masks = [t.dtype == torch.bool for t in given]
    return all(masks) or (not any(masks) and all(t.shape[0] == 1 for t in given))


def is_compiled_backward(spec: Spec, made: Sequence[Tensor], wanted: Sequence[bool]) -> bool:
    """Whether C computes these gradients: it has run forward, and it treats given statistics as
    constants."""
    place = spec.place("fixed")
    statistics = () if place is None else wanted[place : place + 2]
    return Made.of(spec, made).kept is not None and not any(statistics)


class Made(NamedTuple):
    """What ``recur`` returns, apart."""

    rows: Tensor
    state: tuple[Tensor, ...]
    statistics: Tensor | None
    """Mean and variance of the batch, (2, K, D·C), where it takes them."""
    kept: Tensor | None
    """For the way back of the compiled kernels."""

    @staticmethod
    def of(spec: Spec, made: Sequence[Tensor]) -> "Made":
        rows, *rest = made
        state, rest = tuple(rest[: spec.parts]), rest[spec.parts :]
        statistics = rest.pop(0) if spec.measures else None
        return Made(rows, state, statistics, rest[0] if rest else None)


_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


def derived_by_loop(
    spec: Spec, steps: Steps, tensors: Flat, grads: Flat, wanted: Sequence[bool], again: bool
) -> list[Tensor]:
    """The same gradients in torch's operations, to be differentiated ``again`` or not."""
    with torch.enable_grad():
        # Views, so that an input that depends on another one counts for itself alone.
        seen = [None if t is None else t.view_as(t) for t in tensors]
        for t, want in zip(seen, wanted, strict=True):
            if want and not t.requires_grad:  # type: ignore[union-attr]
                t.requires_grad_()  # type: ignore[union-attr]
        frames = _frames(steps, rows_of(tensors))
        if frames.steps.sizes:
            rows, state, _ = loop(*restored(spec, frames.steps, frames.taken(seen)))
            state = [frames.whole(part, seen[H0 + k]) for k, part in enumerate(state)]
            made = frames.spread(rows), *state
        else:  # padding alone: the state stays as it was
            starts = seen[H0 : H0 + spec.parts]
            made = None, *(s if s is not None and s.requires_grad else None for s in starts)
        pairs = zip(made, grads, strict=False)
        given = [(out, grad) for out, grad in pairs if out is not None and grad is not None]
        sources: Any = [t for t, want in zip(seen, wanted, strict=True) if want]
        if not given:
            return [torch.zeros_like(t) for t in sources]
        outputs, heads = zip(*given, strict=True)
        return list(
            torch.autograd.grad(outputs, sources, heads, create_graph=again, materialize_grads=True)
        )


def operands(spec: Spec, steps: Steps, tensors: Flat) -> tuple[Any, ...]:
    """A call as the operators take it."""
    if isinstance(steps, Traced):
        sizes = steps.batch_sizes
    else:
        sizes = torch.tensor(steps.sizes, device="cpu") if steps.ragged else None
    return list(tensors), sizes, steps.time, steps.batch, *spec


def _frames(steps: Steps, rows: int) -> Frames:
    if isinstance(steps, Traced):
        return Frames.of(steps.batch_sizes, steps.time, steps.batch, rows)
    return Frames(steps)


def spec_of(mode: str, reverse: Sequence[bool], plug: str, numbers: Sequence[float]) -> Spec:
    return Spec(mode, tuple(reverse), plug, tuple(numbers))


@torch.library.impl(_OPS, "recur", "CompositeExplicitAutograd")
def _recur(tensors: Flat, sizes: Tensor | None, time: int, batch: int, *about: Any) -> list[Tensor]:
    spec, keep, rows = spec_of(*about[:4]), about[4], rows_of(tensors)
    check_flat(spec, Traced(time, batch, rows, sizes), tensors)
    frames = Frames.of(sizes, time, batch, rows)
    if not frames.steps.sizes:
        return _of_nobody(spec, tensors, time, batch, keep)
    check_given(frames.steps, spec, tensors)
    steps, some = frames.steps, frames.taken(tensors)
    if steps.rows and is_compiled(spec, some):
        kept = kept_floats(spec, some, time, rows) if keep else 0
        made = forward(spec, steps, some, keep, kept)
    else:
        rows, state, found = loop(*restored(spec, steps, some))
        made = [rows, *state, *([] if found is None else [torch.stack(found[:2])])]
    made[0] = frames.spread(made[0])
    for k in range(spec.parts):
        made[1 + k] = frames.whole(made[1 + k], tensors[H0 + k])
    missing = time - steps.time
    if missing and spec.measures and spec.by_step:
        made[1 + spec.parts] = F.pad(made[1 + spec.parts], (0, 0, 0, missing))
    return made


def _of_nobody(spec: Spec, tensors: Flat, time: int, batch: int, keep: bool) -> list[Tensor]:
    """What comes of padding alone: the state stays as it was."""
    made = [t.zero_() for t in _results(spec, tensors, time, batch, keep)]
    for k in range(spec.parts):
        given = tensors[H0 + k]
        if given is not None:
            made[1 + k].copy_(given)
    return made


@torch.library.impl(_OPS, "recur_backward", "CompositeExplicitAutograd")
def _recur_backward(
    tensors: Flat, sizes: Tensor | None, time: int, batch: int, *about: Any
) -> list[Tensor]:
    spec, (made, grads, wanted) = spec_of(*about[:4]), about[4:]
    traced = Traced(time, batch, rows_of(tensors), sizes)
    check_flat(spec, traced, tensors)
    frames = _frames(traced, traced.rows)
    if frames.steps.sizes:
        check_given(frames.steps, spec, tensors)
    _check_backward(spec, tensors, (time, batch), made, grads, wanted)
    if not is_compiled_backward(spec, made, wanted) or not frames.steps.sizes:
        with torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False):
            found = derived_by_loop(spec, traced, tensors, grads, wanted, again=False)
        return [grad.clone(memory_format=torch.contiguous_format) for grad in found]
    steps, own = frames.steps, [frames.picked(made[0]), *made[1:]]
    if time > steps.time and spec.measures and spec.by_step:
        own[1 + spec.parts] = made[1 + spec.parts][:, : steps.time].contiguous()
    heads = [frames.picked(grads[0]), *map(frames.begun, grads[1:])]
    found = backward(spec, steps, frames.taken(tensors), own, heads, wanted)  # type: ignore[arg-type]
    places = [k for k, want in enumerate(wanted) if want]
    for n, k in enumerate(places):
        if k == X:
            found[n] = frames.spread(found[n])
        elif k in (H0, C0):
            found[n] = frames.whole(found[n], grads[k])
    return found


@torch.library.impl(_OPS, "recur_backward", "Batched")
def _recur_backward_batched(
    tensors: Flat, sizes: Tensor | None, time: int, batch: int, *about: Any
) -> list[Tensor]:
    """Many cotangents at once, as of a Jacobian: torch's operations know how."""
    spec, (_, grads, wanted) = spec_of(*about[:4]), about[4:]
    steps = Traced(time, batch, rows_of(tensors), sizes)
    return derived_by_loop(spec, steps, tensors, grads, wanted, again=torch.is_grad_enabled())


def rows_of(tensors: Flat) -> int:
    """The number of rows of the input, padding included."""
    x = tensors[X] if tensors else None
    if x is None or x.dim() != 2:
        raise ValueError(f"the input should be rows (N, I), got {x if x is None else x.shape}")
    return x.shape[0]


def _check_backward(
    spec: Spec,
    tensors: Flat,
    size: tuple[int, int],
    made: Sequence[Tensor],
    grads: Flat,
    wanted: Sequence[bool],
) -> None:
    """Check what the backward pass takes on top of the forward pass."""
    x, expected = tensors[X], _result_types(spec, tensors, *size, keep=True)
    assert x is not None
    outputs = 1 + spec.parts
    needed = outputs + spec.measures
    check_tensors("gradients", grads, expected[:outputs], x)
    # The final state is not read: any tensor may stand in for it.
    if len(made) not in (needed, len(expected)):
        raise ValueError(f"expected {needed} or {len(expected)} outputs, got {len(made)}")
    read = made[0], *made[outputs:]
    check_tensors("outputs", read, [expected[0], *expected[outputs : len(made)]], x)
    if len(wanted) != len(tensors):
        raise ValueError(f"expected {len(tensors)} flags of wanted gradients, got {len(wanted)}")
    if any(want and t is None for t, want in zip(tensors, wanted, strict=True)):
        raise ValueError("a gradient is wanted of a tensor that was not given")
    if any(wanted[RESETS:FIRST]):
        raise ValueError("resets and zoneout have no gradient")


@torch.library.register_fake("normrnn::recur", lib=_OPS)
def _(tensors: Flat, sizes: Tensor | None, time: int, batch: int, *about: Any) -> list[Tensor]:
    spec = spec_of(*about[:4])
    check_flat(spec, Traced(time, batch, rows_of(tensors), sizes), tensors)
    return _results(spec, tensors, time, batch, about[4])


def _results(spec: Spec, tensors: Flat, time: int, batch: int, keep: bool) -> list[Tensor]:
    """Room for what ``recur`` returns."""
    x = tensors[X]
    assert x is not None
    types = _result_types(spec, tensors, time, batch, keep)
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in types]


def _result_types(
    spec: Spec, tensors: Flat, time: int, batch: int, keep: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and types of what ``recur`` returns."""
    x, w_hh = tensors[X], tensors[spec.first_cell + 1]
    assert x is not None
    assert w_hh is not None
    D, N, (C, shown) = len(spec.reverse), x.shape[0], w_hh.shape
    H = C // GATES[spec.mode]
    parts = (shown, H)[: spec.parts]  # h is narrower where it is projected
    shapes = [(N, D * shown), *((D, batch, size) for size in parts)]
    types: list[Any] = [(shape, x.dtype) for shape in shapes]
    if spec.measures:
        shape = 2, (time if spec.by_step else 1), D * spec.channels(H)
        types.append((shape, wide(x.dtype)))
    if keep and is_compiled(spec, tensors):
        types.append(((kept_floats(spec, tensors, time, N),), x.dtype))
    return types


@torch.library.register_fake("normrnn::recur_backward", lib=_OPS)
def _(tensors: Flat, sizes: Tensor | None, time: int, batch: int, *about: Any) -> list[Tensor]:
    spec, (made, grads, wanted) = spec_of(*about[:4]), about[4:]
    check_flat(spec, Traced(time, batch, rows_of(tensors), sizes), tensors)
    _check_backward(spec, tensors, (time, batch), made, grads, wanted)
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format)
        for t, want in zip(tensors, wanted, strict=True)
        if t is not None and want
    ]
