"""Argument checks of the recurrence: the one place, for functions and operators alike.

The compiled kernel reads memory by the sizes it is given, so every accepted call must be safe.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normrnn.ops.call import GATES, Call, Inputs, Plain, Plug, RecurrentNorm
from normrnn.ops.flat import C0, H0, OF_A_CELL, Flat, Spec, X, is_known, number_names, restored
from normrnn.ops.statistics import LONE
from normrnn.ops.steps import Steps


def check_flat(spec: Spec, steps: Steps, tensors: Flat) -> None:
    """Check the arguments of an operator; ValueError if a call cannot be made of them."""
    if spec.mode not in GATES:
        raise ValueError(f"unknown mode {spec.mode!r}: choose one of {', '.join(GATES)}")
    if not is_known(spec.plug):
        raise ValueError(f"unknown normalisation {spec.plug!r}")
    names = number_names(spec.plug)
    if len(spec.numbers) != len(names):
        raise ValueError(f"{spec.plug} takes the numbers {names}, got {len(spec.numbers)} numbers")
    for name, value in zip(names, spec.numbers, strict=True):
        if name != "eps" and value not in (0, 1):
            raise ValueError(f"{name} should be 0 or 1, got {value}")
    D = len(spec.reverse)
    expected = spec.first_cell + D * OF_A_CELL
    if len(tensors) != expected:
        raise ValueError(
            f"{spec.plug} with {D} directions takes {expected} tensors, got {len(tensors)}"
        )
    cells = [tensors[k : k + OF_A_CELL] for k in range(spec.first_cell, expected, OF_A_CELL)]
    if tensors[X] is None or any(cell[1] is None for cell in cells):
        raise ValueError("the input and the recurrent weights cannot be None")
    if len({cell[0] is None for cell in cells}) > 1:
        raise ValueError("input weights should be given for all directions or for none")
    place = spec.place("fixed")
    pairs = {} if place is None else {"mean and variance": (place, place + 1)}
    if spec.mode == "LSTM":
        pairs["h0 and c0"] = H0, C0
    elif tensors[C0] is not None:
        raise ValueError(f"{spec.mode} has no cell state, got c0")
    for names, (first, second) in pairs.items():
        if (tensors[first] is None) != (tensors[second] is None):
            raise ValueError(f"{names} should be given together")
    check(*restored(spec, steps, tensors))


def check(call: Call, inputs: Inputs, plug: Plug) -> None:
    """Check shapes, types, devices and numbers of a call; ValueError if one does not fit."""
    if call.mode not in GATES:
        raise ValueError(f"unknown mode {call.mode!r}: choose one of {', '.join(GATES)}")
    x, cells, state, w_ih = inputs
    D, N, B = len(call.reverse), call.steps.rows, call.steps.batch
    if D not in (1, 2):
        raise ValueError(f"a layer has one or two directions, got reverse={call.reverse}")
    if len(cells) != D:
        raise ValueError(f"{D} directions need {D} sets of recurrent weights, got {len(cells)}")
    if len(w_ih) not in (0, D):
        raise ValueError(f"{D} directions need {D} input weights or none, got {len(w_ih)}")
    matrices = (*w_ih, *(m for cell in cells for m in (cell.w_hh, cell.w_hr) if m is not None))
    for matrix in (x, *matrices):
        if matrix.dim() != 2 or not matrix.is_floating_point():
            raise ValueError(
                f"the input and the weights should be matrices of real numbers, got {matrix.dtype} "
                f"of shape {tuple(matrix.shape)}"
            )
    shown, H = cells[0].sizes
    C = GATES[call.mode] * H
    if w_ih:
        _expect("rows", x, (N, w_ih[0].shape[-1]), x)
    else:
        _expect("gate inputs", x, (N, D * C), x)
    for weight in w_ih:
        _expect("the input weight", weight, (C, x.shape[1]), x)
    for cell in cells:
        _expect("the recurrent weight", cell.w_hh, (C, shown), x)
        if (cell.w_hr is None) != (cells[0].w_hr is None):
            raise ValueError("projections should be given for all directions or for none")
        if cell.w_hr is not None:
            if call.mode != "LSTM":
                raise ValueError(f"{call.mode} has no projection, got w_hr")
            _expect("the projection", cell.w_hr, (shown, H), x)
        for vector in (cell.bias_hn, *cell.peephole):
            if vector is not None:
                _expect("a vector of the cell", vector, (H,), x)
    if call.resets is not None:
        _check_resets(call.resets, N, x)
    _check_zoneout(call, shown, x)
    parts = 2 if call.mode == "LSTM" else 1
    if state is not None and len(state) != parts:
        raise ValueError(f"the initial state of {call.mode} has {parts} parts, got {len(state)}")
    for part, size in zip(state or (), (shown, H), strict=False):
        _expect("an initial state", part, (D, B, size), x)
    _check_plug(call, plug, H, x)


def check_given(steps: Steps, spec: Spec, tensors: Flat) -> None:
    """ValueError where given statistics are needed, by a group of one row too, and missing."""
    place = spec.place("fixed")
    if place is None or tensors[place] is not None:
        return
    if not spec.measures or steps.may_be_lone(spec.by_step):
        raise ValueError(LONE)


def check_sizes(sizes: Tensor | None, time: int, batch: int, rows: int) -> list[int]:
    """Check the sizes of the time steps, which may end with zeros; return those of real steps.

    ``rows`` are the frames alone, or all of a padded batch.
    """
    if min(time, batch) < 0:
        raise ValueError(f"time and batch should not be negative, got {time} and {batch}")
    if sizes is None:
        if rows != time * batch:
            raise ValueError(f"{time} steps of {batch} sequences are not {rows} rows")
        return [batch] * time if batch else []
    if sizes.shape != (time,) or sizes.dtype != torch.int64:
        raise ValueError(
            f"sizes should be torch.int64 of shape {(time,)}, got {sizes.dtype} of shape "
            f"{tuple(sizes.shape)}"
        )
    values = sizes.tolist()
    alive = values[: len(values) - values.count(0)]
    if 0 in alive:
        raise ValueError(f"sizes of time steps should be 0 at the end alone, got {values}")
    Steps.packed(alive)  # which checks the rest
    first = alive[0] if alive else 0
    is_packed = rows == sum(alive) and first == batch
    is_padded = rows == time * batch and first <= batch
    is_empty = rows == sum(alive) == 0
    if not (is_packed or is_padded or is_empty):
        raise ValueError(f"steps of sizes {values} and {batch} sequences do not fit {rows} rows")
    return alive


def check_tensors(
    what: str, tensors: Sequence[Tensor | None], shapes: Sequence[tuple[Any, ...]], like: Tensor
) -> None:
    """Check a list of optional tensors against the same number of (shape, dtype)."""
    if len(tensors) != len(shapes):
        raise ValueError(f"expected {len(shapes)} {what}, got {len(tensors)}")
    for tensor, (shape, dtype) in zip(tensors, shapes, strict=True):
        if tensor is not None:
            _expect(f"one of the {what}", tensor, shape, like, dtype)


def _check_resets(resets: Tensor, rows: int, x: Tensor) -> None:
    if resets.shape != (rows,) or resets.dtype != torch.bool or resets.device != x.device:
        raise ValueError(
            f"resets should be torch.bool of shape {(rows,)} on {x.device}, one for each row, "
            f"got {resets.dtype} of shape {tuple(resets.shape)} on {resets.device}"
        )


def _check_zoneout(call: Call, size: int, x: Tensor) -> None:
    for kept in call.zoneout:
        if kept is None:
            continue
        shared = kept.dtype != torch.bool and kept.shape[:1] == (1,)
        shape = 1 if shared else call.steps.rows, len(call.reverse) * size
        _expect("zoneout", kept, shape, x, torch.bool if kept.dtype == torch.bool else x.dtype)
        if kept.requires_grad:
            raise ValueError("zoneout has no gradient: give it without requires_grad")


def _check_plug(call: Call, plug: Plug, H: int, x: Tensor) -> None:
    """Check shapes and numbers; a normalisation may have a wider type than its input."""
    D, C = len(call.reverse), GATES[call.mode] * H
    if not isinstance(plug, Plain) and not 0 <= plug.eps < float("inf"):
        raise ValueError(f"eps should be finite and not negative, got {plug.eps}")
    has_cell = getattr(plug, "cell", False)
    if has_cell and call.mode != "LSTM":
        raise ValueError(f"{call.mode} has no cell to normalise")
    sizes = {"weight": C, "bias": C, "gamma_hh": C, "weight_c": H, "bias_c": H}
    for name, size in sizes.items():
        vector = getattr(plug, name, None)
        if vector is not None:
            _expect_real(f"{name} of the normalisation", vector, (D * size,), x)
    given = D * ((2 * C + has_cell * H) if isinstance(plug, RecurrentNorm) else C)
    fixed: Any = getattr(plug, "fixed", None) or ()
    for value in fixed:
        slots = 1 if fixed[0].shape[:1] == (1,) else call.steps.time
        _expect_real("given statistics", value, (slots, given), x)


def _expect_real(what: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"{what} should be real numbers, got {tensor.dtype}")
    _expect(what, tensor, shape, like, tensor.dtype)


def _expect(
    what: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    like: Tensor,
    dtype: torch.dtype | None = None,
) -> None:
    dtype = like.dtype if dtype is None else dtype
    if tensor.shape != shape:
        raise ValueError(f"{what} should have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype != dtype or tensor.device != like.device:
        raise ValueError(
            f"{what} should be {dtype} on {like.device} as the input is, "
            f"got {tensor.dtype} on {tensor.device}"
        )
