"""Dropout outside the recurrent layers, of the kinds that they have between them."""

from typing import Any, Literal

import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from normrnn.ops.layout import Steps
from normrnn.ops.regularise import locked_dropout


class Dropout(nn.Dropout):
    """:class:`torch.nn.Dropout` of (T, B, F), or packed; ``kind="locked"``: one mask per sequence.

    >>> import torch
    >>> out = Dropout(0.5, "locked")(torch.ones(3, 2, 8))
    >>> torch.equal(out[0], out[2])
    True
    """

    def __init__(self, p: float = 0.5, kind: Literal["element", "locked"] = "element"):
        super().__init__(p)
        if kind not in ("element", "locked"):
            raise ValueError(f"unknown kind={kind!r}: choose 'element' or 'locked'")
        self.kind = kind

    def forward(self, input: Any) -> Any:
        packed = isinstance(input, PackedSequence)
        if not self.training or self.p == 0:
            return input
        if self.kind == "element":
            dropped = F.dropout(input.data if packed else input, self.p)
        elif packed:
            dropped = locked_dropout(input.data, Steps.packed(input.batch_sizes), self.p)
        else:
            steps = Steps.dense(*input.shape[:2])
            dropped = locked_dropout(input.flatten(0, 1), steps, self.p).view_as(input)
        return input._replace(data=dropped) if packed else dropped
