"""Layer normalisation of both transitions: every row by its own mean and variance."""

from normrnn.nn.normaliser import Resolved, TransitionsNorm
from normrnn.ops.call import Norm
from normrnn.ops.layout import Steps


class LayerNormaliser(TransitionsNorm):
    """LN(W_x x; γ_x) + LN(W_h h; γ_h) + β over all C features; no statistics are kept."""

    def resolve(self, steps: Steps) -> Resolved:  # noqa: ARG002
        return Resolved()

    def norm(self, resolved: Resolved, steps: Steps) -> Norm:  # noqa: ARG002
        static = "row", self.eps, False, False, self.cell_norm
        return Norm(*static, self.weight, self.bias, self.gamma_hh, self.weight_c, self.bias_c)
