"""Layer normalisation of both transitions: every row by its own mean and variance."""

from typing import Any

from torch import Tensor

from normrnn.nn.normaliser import GateNorm
from normrnn.ops.call import RowNorm
from normrnn.ops.steps import Steps


class LayerNormaliser(GateNorm):
    """LN(W_x x; γ_x) + LN(W_h h; γ_h) + β over all C features; no statistics are kept.

    Shapes: ``weight`` (γ_x), ``weight_hh`` (γ_h) and ``bias`` (β) are (C,); with ``cell_norm``
    ``weight_c`` and ``bias_c``, of LN on the LSTM's c before tanh, (H,).
    """

    weight_hh: Tensor | None
    weight_c: Tensor | None
    bias_c: Tensor | None

    def __init__(
        self,
        channels: int,
        *,
        hidden: int,
        affine: bool = True,
        bias: bool = True,
        cell_norm: bool = False,
        **options: Any,
    ):
        super().__init__(channels, affine=affine, bias=bias, **options)
        self.cell_norm = cell_norm
        where = options.get("device"), options.get("dtype")
        self._vector("weight_hh", channels, affine, *where)
        self._vector("weight_c", hidden, affine and cell_norm, *where)
        self._vector("bias_c", hidden, affine and bias and cell_norm, *where)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{', cell_norm=True' if self.cell_norm else ''}"

    def plug(self, steps: Steps) -> RowNorm:  # noqa: ARG002
        return RowNorm(
            self.weight,
            self.weight_hh,
            self.bias,
            self.eps,
            self.cell_norm,
            self.weight_c,
            self.bias_c,
        )
