"""A normalisation of a user's own: divide the gate inputs of a row by their root mean square."""

from torch import Tensor

from normrnn.nn.normaliser import GateNorm
from normrnn.norms import Norm
from normrnn.ops import Steps


class RowScale(GateNorm):
    """`rows` (N, C) are the gate inputs of all unpadded frames; `weight` is γ, `bias` is β."""

    def forward(self, rows: Tensor, steps: Steps) -> Tensor:  # noqa: ARG002
        size = rows.square().mean(1, keepdim=True).add(self.eps).sqrt()
        return rows / size * self.weight + self.bias  # type: ignore[operator]


toy = Norm(
    name="toy",
    words="network with scaled rows",
    acts="input",  # on W_x x, before the recurrence
    pools=None,  # no statistics over several rows
    implementation=f"{__name__}:RowScale",
)
