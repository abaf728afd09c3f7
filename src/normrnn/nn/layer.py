"""Layer normalisation of both transitions: every row by its own mean and variance."""

from normrnn.nn.normaliser import OfBothTransitions
from normrnn.ops.call import RowNorm
from normrnn.ops.steps import Steps


class LayerNormaliser(OfBothTransitions):
    """LN(W_x x; γ_x) + LN(W_h h; γ_h) + β over all C features; no statistics are kept."""

    def plug(self, steps: Steps) -> RowNorm:  # noqa: ARG002
        return RowNorm(
            self.weight,
            self.gamma_hh,
            self.bias,
            self.eps,
            self.cell_norm,
            self.weight_c,
            self.bias_c,
        )
