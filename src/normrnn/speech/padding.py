"""Statistics that count padding, for a study of their effect.

Toolkits that normalise padded batches have such statistics. Nothing else sees the padding.
"""

from typing import Any

import torch
from torch import Tensor, nn

from normrnn.nn.base import Normalised
from normrnn.ops.layout import Steps


class _Padded(Steps):
    """A padded batch, and the places in it of the rows of the ragged one."""

    def __init__(self, sizes: tuple[int, ...], places: Tensor):
        super().__init__(sizes)
        self.places = places


def count_padding(layer: Normalised) -> None:
    """Normalise W_x x as if every sequence was padded with zeros to the longest of its batch.

    For norms of the input transition.
    """
    for normaliser in layer.normalisers():
        normaliser.register_forward_pre_hook(_pad)
        normaliser.register_forward_hook(_cut)


def _pad(_: nn.Module, given: tuple[Tensor, Steps]) -> tuple[Tensor, Steps]:
    rows, steps = given
    sizes, offsets = (torch.tensor(v, device=rows.device) for v in (steps.sizes, steps.offsets))
    moved = torch.arange(steps.time, device=rows.device) * steps.batch - offsets
    places = torch.arange(steps.rows, device=rows.device) + moved.repeat_interleave(sizes)
    padded = _Padded((steps.batch,) * steps.time, places)
    return rows.new_zeros(padded.rows, rows.shape[1]).index_copy(0, places, rows), padded


def _cut(_: nn.Module, given: tuple[Tensor, Any], output: Tensor) -> Tensor:
    return output[given[1].places]
