"""Padded batches to and from the layout of rows, and checks of lengths and resets."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence


def check_lengths(input: Tensor, lengths: Tensor | Sequence[int], batch_first: bool) -> Tensor:
    """Return the lengths of a padded batch, (B,), on the CPU; ValueError if they do not fit."""
    values, time = _as_tensor(input, lengths, batch_first)
    values = values.to("cpu", torch.int64)
    if len(values) and int(values.min()) < 0:
        raise ValueError(f"lengths must not be negative, got lengths {_shown(values)}")
    if len(values) and int(values.max()) > time:
        raise ValueError(f"lengths must not exceed T={time}, got lengths {_shown(values)}")
    return values


def _as_tensor(
    input: Tensor, lengths: Tensor | Sequence[int], batch_first: bool
) -> tuple[Tensor, int]:
    """Return lengths (B,), their values unchecked, and T."""
    if isinstance(input, PackedSequence):
        raise ValueError("lengths= goes with a padded tensor; a PackedSequence has its own")
    if input.dim() != 3:
        raise ValueError(
            f"lengths= goes with a padded batch of 3 dimensions, got {input.dim()}; "
            "an unbatched sequence is its own length"
        )
    batch, time = (input.shape[0], input.shape[1]) if batch_first else input.shape[1::-1]
    values = torch.as_tensor(lengths)
    if values.dim() != 1 or values.shape[0] != batch:
        fits = values.dim() == 1 and values.shape[0] == time
        hint = f"; with batch_first={not batch_first} they would fit the input" if fits else ""
        raise ValueError(
            f"lengths must be one number per sequence: expected {batch}, "
            f"got shape {tuple(values.shape)}{hint}"
        )
    values = values if batch else values.long()  # an empty list has no type
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ValueError(f"lengths must be integers, got {values.dtype}")
    return values, time


def traced_lengths(input: Tensor, lengths: Tensor | Sequence[int], batch_first: bool) -> Tensor:
    """Return lengths (B,) for a tracer: wrong values raise when the graph runs."""
    values, time = _as_tensor(input, lengths, batch_first)
    possible = ((values >= 0) & (values <= time)).all()
    torch._assert_async(possible, "lengths must be neither negative nor greater than T")
    return values


def sorted_by_length(
    input: Tensor, lengths: Tensor | Sequence[int], batch_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (T, B, I), longest sequence first, its lengths on the CPU, and the order; for a
    tracer, as ``traced_lengths``."""
    values = traced_lengths(input, lengths, batch_first)
    x = input.transpose(0, 1) if batch_first else input
    order = values.argsort(descending=True, stable=True)
    values = values.index_select(0, order).to("cpu", torch.int64)
    order = order.to(input.device)
    return x.index_select(1, order), values, order


def pack(input: Tensor, lengths: Tensor, batch_first: bool) -> PackedSequence:
    """Pack a padded batch; the values in the padding are never read."""
    return pack_padded_sequence(input, lengths, batch_first, enforce_sorted=False)


def unpack(output: PackedSequence, batch_first: bool, time: int) -> Tensor:
    """Pad the output to the input's T, with 0 in the padding.

    torch's ``pad_packed_sequence`` also copies the order of the sequences to the host.
    """
    sizes, order = output.batch_sizes, output.unsorted_indices
    padded = torch._VF._pad_packed_sequence(output.data, sizes, batch_first, 0.0, time)[0]
    return padded if order is None else padded.index_select(0 if batch_first else 1, order)


def check_resets(resets: Any, input: Tensor | PackedSequence) -> Any:
    """Return one boolean per frame, in the form of the input; ValueError if they do not fit."""
    if isinstance(input, PackedSequence):
        return _check_packed(resets, input)
    if isinstance(resets, PackedSequence):
        raise ValueError("resets= is packed and the input is not: pack both alike, or none")
    values = torch.as_tensor(resets)
    _check_values(values, tuple(input.shape[:-1]), "of the input, without its features")
    # A copy: the backward pass reads it too, and a caller may reuse its buffer before that.
    return values.to(input.device, copy=True)


def _check_packed(resets: Any, input: PackedSequence) -> PackedSequence:
    if not isinstance(resets, PackedSequence):
        raise ValueError(
            "resets= of a PackedSequence has to be one too, made with the same lengths and "
            f"enforce_sorted, got a {type(resets).__name__}"
        )
    _check_values(resets.data, (len(input.data),), "of the input's rows")
    for name in ("batch_sizes", "sorted_indices"):
        first, second = getattr(resets, name), getattr(input, name)
        if first is second:
            continue
        if first is None or second is None or not torch.equal(first, second):
            raise ValueError(f"resets= is packed in another order than the input: {name} differ")
    return resets._replace(data=resets.data.to(input.data.device, copy=True))


def _check_values(resets: Tensor, shape: tuple[int, ...], whose: str) -> None:
    if resets.shape != shape:
        raise ValueError(f"resets must have the shape {whose}: {shape}, got {tuple(resets.shape)}")
    if resets.dtype != torch.bool:
        raise ValueError(f"resets must be torch.bool, got {resets.dtype}: give resets.bool()")


def _shown(lengths: Tensor) -> str:
    shown = ", ".join(str(int(n)) for n in lengths[:8])
    return f"[{shown}{', …' if len(lengths) > 8 else ''}]"
