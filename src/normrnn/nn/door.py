"""Padded batches in and out of the layout of rows."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


def checked(input: Tensor, lengths: Tensor | Sequence[int], batch_first: bool) -> Tensor:
    """The lengths of a padded batch, (B,); ValueError if they cannot be."""
    if isinstance(input, PackedSequence):
        raise ValueError("lengths= goes with a padded tensor; a PackedSequence has its own")
    if input.dim() != 3:
        raise ValueError(
            f"lengths= goes with a padded batch of 3 dimensions, got {input.dim()}; "
            "an unbatched sequence is its own length"
        )
    batch, time = (input.shape[0], input.shape[1]) if batch_first else input.shape[1::-1]
    values = torch.as_tensor(lengths)
    if values.dim() != 1 or len(values) != batch:
        raise ValueError(
            f"lengths must be one number per sequence: expected {batch}, "
            f"got shape {tuple(values.shape)}"
        )
    values = values if batch else values.long()  # an empty list says nothing of its type
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ValueError(f"lengths must be integers, got {values.dtype}")
    values = values.to("cpu", torch.int64)
    if batch and int(values.min()) < 1:
        raise ValueError(f"every sequence needs at least one frame, got lengths {_few(values)}")
    if batch and int(values.max()) > time:
        raise ValueError(f"lengths must not exceed T={time}, got lengths {_few(values)}")
    return values


def pack(input: Tensor, lengths: Tensor, batch_first: bool) -> PackedSequence:
    """A padded batch as a PackedSequence; whatever the padding holds is not looked at."""
    return pack_padded_sequence(input, lengths, batch_first, enforce_sorted=False)


def unpack(output: PackedSequence, batch_first: bool, time: int) -> Tensor:
    """Back to a padded tensor of the input's T, with 0 in the padding."""
    return pad_packed_sequence(output, batch_first, total_length=time)[0]


def _few(lengths: Tensor) -> str:
    shown = ", ".join(str(int(n)) for n in lengths[:8])
    return f"[{shown}{', …' if len(lengths) > 8 else ''}]"
