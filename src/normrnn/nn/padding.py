"""Statistics that count padding, as toolkits that normalise padded batches have them: for one
study, of what that does. Nothing else of the network sees padding."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normrnn.nn.base import Normalised
from normrnn.ops.layout import Steps


@dataclass(frozen=True)
class _Padded(Steps):
    """A padded batch, and where in it the rows of the ragged one lie."""

    places: Tensor = field(compare=False, default_factory=lambda: torch.empty(0))


def count_padding(layer: Normalised) -> None:
    """From now on W_x x is normalised as if every sequence went on with zeros to the length of
    its batch's longest. For norms of the input transition."""
    for normaliser in layer.normalisers():
        normaliser.register_forward_pre_hook(_pad)
        normaliser.register_forward_hook(_cut)


def _pad(_: nn.Module, given: tuple[Tensor, Steps]) -> tuple[Tensor, Steps]:
    rows, steps = given
    sizes, offsets = (torch.tensor(v, device=rows.device) for v in (steps.sizes, steps.offsets))
    moved = torch.arange(len(steps), device=rows.device) * steps.batch - offsets
    places = torch.arange(steps.rows, device=rows.device) + moved.repeat_interleave(sizes)
    padded = _Padded((steps.batch,) * len(steps), places)
    return rows.new_zeros(padded.rows, rows.shape[1]).index_copy(0, places, rows), padded


def _cut(_: nn.Module, given: tuple[Tensor, Any], output: Tensor) -> Tensor:
    return output[given[1].places]
