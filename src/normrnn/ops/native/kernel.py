"""Calls into the compiled kernels: shapes, options and one pointer per tensor.

C knows its memory layout (`arguments.h`); Python allocates the outputs and one block, ``kept``,
that the backward pass reads.
"""

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normrnn.ops.call import InputNorm, Plain, RecurrentNorm, RowNorm, StepNorm
from normrnn.ops.flat import FIRST, KEPT_C, KEPT_H, OF_A_CELL, Flat, Spec
from normrnn.ops.native.library import library, out_of_memory
from normrnn.ops.steps import Steps

NUMBERS = (
    *("T", "B", "N", "H", "I", "D", "threads", "mode", "norm", "reverse", "reverse_1"),
    *("per_step", "batch", "fixed_per_step", "cell", "masks", "keep"),
)
"""The integers of `Arguments`, in order; ε follows."""
NORMS = [kind.__name__ for kind in (Plain, InputNorm, StepNorm, RowNorm, RecurrentNorm)]
"""Normalisations that C knows, as `arguments.h` numbers them."""
_MODES = "RNN_TANH", "RNN_RELU", "LSTM", "GRU"
_VECTORS = "weight", "bias", "gamma_hh", "weight_c", "bias_c", "fixed", "fixed.1"
_TENSORS = FIRST + len(_VECTORS) + 2 * OF_A_CELL
"""Pointers of `Tensors`."""
LAYOUT = struct.Struct(f"{len(NUMBERS)}qd{2 + _TENSORS + 5 + 3 + _TENSORS}q")
_NO_GRADIENTS = (0,) * (3 + _TENSORS)
Sizes = tuple[int, int, bool, bool]
"""H, I, whether given statistics have a row per step, and whether zoneout has masks."""
_CPU = torch.device("cpu")
_empty = partial(torch.empty, dtype=torch.float32, device=_CPU)


class Plan(NamedTuple):
    """What calls of one kind share."""

    numbers: tuple[float, ...]
    """Numbers and the addresses of the sizes of steps."""
    select: Callable[[Sequence[int]], tuple[int, ...]]
    """From pointers of the flat tensors, and a 0, to those of `Tensors`."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the outputs, with the statistics of the batch and, for a backward pass, ``kept``."""
    parts: int
    """Of a state."""
    has_statistics: bool
    layout: Tensor
    """Sizes and offsets of the steps, alive as long as their addresses."""


def kept_floats(spec: Spec, tensors: Flat, time: int, rows: int) -> int:
    """Count the floats that a backward pass reads; ``time`` and ``rows`` may be symbolic."""
    constant, per_step, per_row = _kept_coefficients(spec, _sizes(spec, tensors))
    return constant + per_step * time + per_row * rows


def forward(
    spec: Spec, steps: Steps, tensors: Flat, keep: bool, kept_size: int = 0
) -> list[Tensor]:
    """Run the forward pass of a layer.

    Args:
        keep: prepare a backward pass.
        kept_size: floats of the kept block, at least those needed, the unused ones 0; by default
            as many as needed.

    Returns:
        Rows, final states, the batch's statistics (2, K, D·C) if they are taken, and with
        ``keep`` the block for the backward pass.
    """
    tensors = [
        t if t is None or (t.is_contiguous() and not t.is_neg()) else t.resolve_neg().contiguous()
        for t in tensors
    ]
    plan = _plan(spec, steps, _sizes(spec, tensors), keep, torch.get_num_threads())
    made = [*map(_empty, plan.shapes)]
    if kept_size:
        made[-1] = torch.zeros(kept_size, dtype=torch.float32, device=_CPU)
    rows, *rest = map(Tensor.data_ptr, made)
    state, rest = [*rest[: plan.parts], 0][:2], rest[plan.parts :]
    statistics = rest[0] if plan.has_statistics else 0
    arguments = LAYOUT.pack(
        *plan.numbers,
        *plan.select([0 if t is None else t.data_ptr() for t in (*tensors, None)]),
        *(rows, *state, statistics, rest[-1] if keep else 0),
        *_NO_GRADIENTS,
    )
    if library().forward(arguments):  # type: ignore[union-attr]
        raise out_of_memory()
    return made


def backward(
    spec: Spec,
    steps: Steps,
    tensors: Flat,
    made: Sequence[Tensor],
    grads: Flat,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Run the backward pass, from what ``forward`` returned: gradients of the wanted tensors."""
    count = len(tensors)
    given = [
        t if t is None or (t.is_contiguous() and not t.is_neg()) else t.resolve_neg().contiguous()
        for t in (*tensors, *grads, made[0], made[-2], made[-1])
    ]
    # The number of threads may differ: this is autograd's thread.
    plan = _plan(spec, steps, _sizes(spec, given), True, torch.get_num_threads())
    derived = [
        torch.empty_like(t) if want else None  # type: ignore[arg-type]
        for t, want in zip(given, wanted, strict=False)
    ]
    *pointers, rows, statistics, kept = [0 if t is None else t.data_ptr() for t in given]
    arguments = LAYOUT.pack(
        *plan.numbers,
        *plan.select((*pointers[:count], 0)),
        *(rows, 0, 0, statistics if plan.has_statistics else 0, kept),
        *(*pointers[count:], 0, 0)[:3],
        *plan.select([0 if t is None else t.data_ptr() for t in (*derived, None)]),
    )
    if library().backward(arguments):  # type: ignore[union-attr]
        raise out_of_memory()
    return [t for t in derived if t is not None]


def _sizes(spec: Spec, tensors: Flat) -> Sizes:
    first, fixed = _places(spec)
    w_ih, w_hh = tensors[first : first + 2]
    mean = None if fixed is None else tensors[fixed]
    zoneout = tensors[KEPT_C] if tensors[KEPT_H] is None else tensors[KEPT_H]
    return (
        int(w_hh.shape[1]),  # type: ignore[union-attr]  # never symbolic
        0 if w_ih is None else int(w_ih.shape[1]),
        mean is not None and bool(mean.shape[0] > 1),
        zoneout is not None and zoneout.dtype == torch.bool,
    )


@lru_cache(maxsize=256)
def _places(spec: Spec) -> tuple[int, int | None]:
    """Return the places of the first cell and of given statistics."""
    return spec.first_cell, spec.place("fixed")


@lru_cache(maxsize=256)
def _plan(spec: Spec, steps: Steps, sizes: Sizes, keep: bool, threads: int) -> Plan:
    layout = torch.tensor([steps.sizes, steps.offsets], dtype=torch.int64, device=_CPU)
    T, B, N, D, H = steps.time, steps.batch, steps.rows, len(spec.reverse), sizes[0]
    shapes: list[tuple[int, ...]] = [(N, D * H), *[(D, B, H)] * spec.parts]
    if spec.measures:
        shapes.append((2, T if spec.by_step else 1, D * spec.channels(H)))
    if keep:
        constant, per_step, per_row = _kept_coefficients(spec, sizes)
        shapes.append((constant + per_step * T + per_row * N,))
    count = spec.first_cell + D * OF_A_CELL
    places = [*range(FIRST), *map(spec.place, _VECTORS), *range(spec.first_cell, count)]
    places += [None] * (_TENSORS - len(places))
    select: Any = itemgetter(*[count if place is None else place for place in places])
    numbers = _numbers(spec, sizes, (T, B, N), threads, keep)
    addresses = layout[0].data_ptr(), layout[1].data_ptr()
    return Plan((*numbers, *addresses), select, tuple(shapes), spec.parts, spec.measures, layout)


def _numbers(
    spec: Spec, sizes: Sizes, counts: tuple[int, int, int], threads: int, keep: bool
) -> list[float]:
    options, (hidden, features, fixed_per_step, masks) = spec.options, sizes
    return [
        *(*counts, hidden, features, len(spec.reverse), threads),
        *(_MODES.index(spec.mode), NORMS.index(spec.plug), spec.reverse[0], spec.reverse[-1]),
        *(options.get("per_step", False), spec.measures, fixed_per_step),
        *(options.get("cell", False), masks, keep, options.get("eps", 0.0)),
    ]


@lru_cache(maxsize=256)
def _kept_coefficients(spec: Spec, sizes: Sizes) -> tuple[int, int, int]:
    """Floats of the kept block: a constant, per time step and per row."""
    loaded = library()
    assert loaded is not None
    pointers = (0,) * (2 + _TENSORS + 5 + 3 + _TENSORS)
    constant, step, row = (
        loaded.kept_floats(LAYOUT.pack(*_numbers(spec, sizes, counts, 1, True), *pointers))
        for counts in ((0, 0, 0), (1, 0, 0), (0, 0, 1))
    )
    return constant, step - constant, row - constant
