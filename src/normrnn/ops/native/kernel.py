"""Calls into the compiled kernels: shapes, options and one pointer per tensor.

C knows its memory layout (`arguments.h`); Python allocates the outputs and one block, ``kept``,
that the backward pass reads.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normrnn.ops.backend import choice
from normrnn.ops.call import CELLS, COUNT, Spec, Tensors
from normrnn.ops.layout import Steps
from normrnn.ops.native.library import library, out_of_memory
from normrnn.ops.statistics import Statistics

NUMBERS = (
    *("T", "B", "N", "H", "I", "D", "threads", "mode", "norm", "reverse", "reverse_1"),
    *("per_step", "batch", "fixed_per_step", "cell", "zoneout_h_rows", "zoneout_c_rows", "keep"),
)
"""The integers of `Arguments`, in order; ε follows."""
LAYOUT = struct.Struct(f"{len(NUMBERS)}qd{2 + COUNT + 5 + 3 + COUNT}q")
_NO_GRADIENTS = (0,) * (3 + COUNT)
_MODES = ("RNN_TANH", "RNN_RELU", "LSTM", "GRU", "LIGRU")
_KINDS = ("none", "input", "step", "row", "recurrent", "rms")
"""The cells and norms that C knows, in the order of its numbers."""
Sizes = tuple[int, int, bool]
"""H, I, and whether given statistics have a row per step."""
_CPU = torch.device("cpu")
_empty = partial(torch.empty, dtype=torch.float32, device=_CPU)
_TENSORS = {Tensor, torch.nn.Parameter}


def is_addressable(tensors: Sequence[Tensor | None]) -> bool:
    """Whether addresses can be passed to C: no tracing, no transforms, real memory."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active():
        return False
    for t in tensors:
        if t is not None and not (type(t) in _TENSORS and torch._C._has_storage(t)):
            return False
    return True


def can_run(spec: Spec, tensors: Tensors) -> bool:
    """Whether C computes this call, which has been checked: float32 on a CPU throughout."""
    x, w_hh, w_ih = tensors.x, tensors.w_hh, tensors.w_ih
    if x.dtype != torch.float32 or not x.is_cpu or library() is None:
        return False
    if choice.selected not in ("auto", "native"):
        return False
    if tensors.w_hr is not None or 0 in w_hh.shape or (w_ih is not None and 0 in w_ih.shape):
        return False
    if spec.mode not in _MODES or spec.kind not in _KINDS:
        return False
    for t in tensors:
        if t is None:
            continue
        if t.layout != torch.strided or (t.dtype != torch.float32 and t.dtype != torch.bool):
            return False
        if type(t) not in _TENSORS and not isinstance(t, torch._subclasses.FakeTensor):
            return False  # another subclass
    return True


class Plan(NamedTuple):
    """The static part of calls with equal sizes."""

    numbers: tuple[float, ...]
    """Integers, ε and the addresses of the sizes of steps."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the outputs."""


def forward(
    spec: Spec, steps: Steps, tensors: Sequence[Tensor | None], keep: bool, kept_size: int = 0
) -> list[Tensor]:
    """Run the forward pass of a layer.

    Args:
        keep: prepare a backward pass.
        kept_size: floats of the kept block, at least those needed, the unused ones 0; by default
            as many as needed.

    Returns:
        Rows, final states, the batch's statistics (2, K, D·C) if they are used, and with ``keep``
        the block for the backward pass.
    """
    tensors = _readable(tensors)
    options = _zoneout_rows(tensors), keep, torch.get_num_threads()
    plan = _plan(spec, steps, _sizes(tensors), *options)
    outputs = [*map(_empty, plan.shapes)]
    if kept_size:
        outputs[-1] = torch.zeros(kept_size, dtype=torch.float32, device=_CPU)
    rows, *rest = map(Tensor.data_ptr, outputs)
    states = CELLS[spec.mode].states
    arguments = LAYOUT.pack(
        *plan.numbers,
        *[0 if t is None else t.data_ptr() for t in tensors],
        *(rows, rest[0], rest[1] if states == 2 else 0),
        *(rest[states] if spec.batch else 0, rest[-1] if keep else 0),
        *_NO_GRADIENTS,
    )
    if library().forward(arguments):  # type: ignore[union-attr]
        raise out_of_memory()
    return outputs


def backward(
    spec: Spec,
    steps: Steps,
    tensors: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Run the backward pass.

    Args:
        saved: of the outputs of ``forward`` the rows, the statistics if there are any, and the
            kept block.
        grads: gradients of rows and final states.

    Returns:
        The gradients of the wanted tensors, None for the others.
    """
    inputs = _readable((*tensors, saved[0], saved[1], saved[-1], *grads))
    # The number of threads may differ: this may be autograd's thread.
    options = _zoneout_rows(inputs), True, torch.get_num_threads()
    plan = _plan(spec, steps, _sizes(inputs), *options)
    derived = [
        torch.empty_like(t) if want else None  # type: ignore[arg-type]
        for t, want in zip(inputs, wanted, strict=False)
    ]
    for t in derived[Tensors.RESETS - 2 : Tensors.RESETS]:  # which C adds to
        if t is not None:
            t.zero_()
    pointers = [0 if t is None else t.data_ptr() for t in (*inputs, *derived)]
    rows, statistics, kept = pointers[COUNT : COUNT + 3]
    heads = pointers[COUNT + 3 : len(inputs)]
    arguments = LAYOUT.pack(
        *plan.numbers,
        *pointers[:COUNT],
        *(rows, 0, 0, statistics if spec.batch else 0, kept),
        *(*heads, 0)[:3],
        *pointers[len(inputs) :],
    )
    if library().backward(arguments):  # type: ignore[union-attr]
        raise out_of_memory()
    return derived


def kept_floats(spec: Spec, tensors: Tensors, time: int, rows: int) -> int:
    """Count the floats that a backward pass reads; ``time`` and ``rows`` may be symbolic."""
    constant, per_step, per_row = _kept_coefficients(spec, _sizes(tensors))
    return constant + per_step * time + per_row * rows


def _readable(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Make tensors contiguous, and masks of zoneout shares."""
    readable = [
        t if t is None or (t.is_contiguous() and not t.is_neg()) else t.resolve_neg().contiguous()
        for t in tensors
    ]
    for k in (Tensors.ZONEOUT, Tensors.ZONEOUT + 1):
        mask = readable[k]
        if mask is not None and mask.dtype == torch.bool:
            readable[k] = mask.float()
    return readable


def _sizes(tensors: Sequence[Tensor | None]) -> Sizes:
    w_ih, w_hh = tensors[Tensors.FIRST : Tensors.FIRST + 2]
    mean = tensors[Tensors.FIRST - 2]
    return (
        int(w_hh.shape[1]),  # type: ignore[union-attr]  # never symbolic
        0 if w_ih is None else int(w_ih.shape[1]),
        mean is not None and bool(mean.shape[0] > 1),
    )


def _zoneout_rows(tensors: Sequence[Tensor | None]) -> tuple[bool, ...]:
    """Whether zoneout of h and of c has a row per frame."""
    h, c = tensors[Tensors.ZONEOUT : Tensors.NORM]
    return h is not None and len(h) > 1, c is not None and len(c) > 1


@lru_cache(maxsize=256)
def _plan(
    spec: Spec, steps: Steps, sizes: Sizes, zoneout: tuple[bool, ...], keep: bool, threads: int
) -> Plan:
    T, B, N, D, H = steps.time, steps.batch, steps.rows, len(spec.reverse), sizes[0]
    shapes: list[tuple[int, ...]] = [(N, D * H), *[(D, B, H)] * CELLS[spec.mode].states]
    if spec.batch:
        shapes.append(spec.statistics_shape(T, H))
    if keep:
        constant, per_step, per_row = _kept_coefficients(spec, sizes)
        shapes.append((constant + per_step * T + per_row * N,))
    # The plan's cache holds the steps, and so the memory at these addresses.
    addresses = steps.native[0].data_ptr(), steps.native[1].data_ptr()
    return Plan(
        (*_numbers(spec, sizes, (T, B, N), zoneout, threads, keep), *addresses), tuple(shapes)
    )


def _numbers(
    spec: Spec,
    sizes: Sizes,
    counts: tuple[int, int, int],
    zoneout: tuple[bool, ...] = (False, False),
    threads: int = 1,
    keep: bool = True,
) -> list[float]:
    hidden, features, fixed_per_step = sizes
    return [
        *(*counts, hidden, features, len(spec.reverse), threads),
        *(_MODES.index(spec.mode), _KINDS.index(spec.kind), spec.reverse[0], spec.reverse[-1]),
        *(spec.per_step, spec.batch, fixed_per_step, spec.cell, *zoneout, keep, spec.eps),
    ]


@lru_cache(maxsize=256)
def _kept_coefficients(spec: Spec, sizes: Sizes) -> tuple[int, int, int]:
    """Return the floats of the kept block: a constant, per time step and per row."""
    loaded = library()
    assert loaded is not None
    pointers = (0,) * (2 + COUNT + 5 + 3 + COUNT)
    constant, step, row = (
        loaded.kept_floats(LAYOUT.pack(*_numbers(spec, sizes, counts), *pointers))
        for counts in ((0, 0, 0), (1, 0, 0), (0, 0, 1))
    )
    return constant, step - constant, row - constant


def update(
    mean: Tensor, var: Tensor, batch: Statistics, share: float, inputs: int = 0
) -> bool | None:
    """Update running buffers (C,) from K groups; groups whose rows are all equal are left out of
    the first ``inputs`` channels.

    All tensors are addressable (``is_addressable``).

    Returns:
        Whether there was an update; None if C cannot do it.
    """
    loaded, (means, variances, count) = library(), batch
    K, C = means.shape
    if loaded is None or not K * C or mean.shape != (C,) or var.shape != (C,):
        return None
    if not 0 <= inputs <= C or choice.selected == "loop":
        return None
    for t in (mean, var, means, variances, count):
        if t.dtype != torch.float32 or not t.is_cpu or t.layout != torch.strided or t.is_neg():
            return None
    stride, one = means.stride()
    if one != 1 or variances.shape != (K, C) or variances.stride() != (stride, 1):
        return None
    if count.shape != (K,) or not count.is_contiguous():
        return None
    if not (mean.is_contiguous() and var.is_contiguous()):
        return None
    counted: Any = torch.empty_like(count)
    pointers = map(Tensor.data_ptr, (count, counted, means, variances))
    running = mean.data_ptr(), var.data_ptr()
    return bool(loaded.update(K, C, stride, inputs, *pointers, share, *running))
