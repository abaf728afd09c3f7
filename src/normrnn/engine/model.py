"""Recurrent layers with a linear head: what the networks of all tasks share, and their weights."""

from collections.abc import Callable
from hashlib import sha256
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from normrnn import norms
from normrnn.engine.loss import Loss, State, nats_and_errors
from normrnn.nn import GRU, LSTM, RNN, LiGRU
from normrnn.nn.base import Normalised
from normrnn.ops.layout import Steps
from normrnn.ops.regularise import locked_dropout

Sequences = Tensor | PackedSequence
"""(T, B, I) of equal lengths, or packed, longest first."""
Generators = Callable[[str], torch.Generator]


def derived_seed(*parts: int | str) -> int:
    """Return a seed that depends on all `parts` and on nothing else."""
    return int.from_bytes(sha256(repr(parts).encode()).digest()[:8], "little")


def generators_by_name() -> Generators:
    """Return a function from a parameter's name to a generator of its own.

    All depend on one draw from torch's generator. Variants of a network built from the same seed
    therefore start from the same values of the parameters that they share, whatever else they have.
    """
    base = int(torch.randint(2**62, (), device="cpu"))
    return lambda name: torch.Generator().manual_seed(derived_seed(base, name))


@torch.no_grad()
def glorot_(rnn: Normalised, decoder: nn.Linear, generators: Generators) -> None:
    """Draw U(-b, b), b = √(6/(I+H)), for each gate's own matrix; set biases to 0; keep γ and β.

    A stacked (4H, I) matrix counts as four of (H, I), a diagonal peephole as the diagonal of an
    (H, H) one.
    """
    H = rnn.hidden_size
    for name, parameter in rnn.named_parameters(recurse=False):
        if name.startswith("bias"):
            parameter.zero_()
        else:
            inputs = parameter.shape[1] if parameter.dim() == 2 else H
            bound = (6 / (inputs + H)) ** 0.5
            parameter.uniform_(-bound, bound, generator=generators(f"rnn.{name}"))
    nn.init.xavier_uniform_(decoder.weight, generator=generators("decoder.weight"))
    decoder.bias.zero_()


@torch.no_grad()
def train_one_bias(rnn: Normalised) -> None:
    """Train only one of torch's two biases, which get equal gradients, as long as they are two.

    Otherwise they would learn at twice the rate of β. ``bias_hh`` stays at zero; of a GRU's the
    candidate's part, which is inside r ⊙ (W_h h + b), is trained.
    """
    is_gru, inside = rnn.mode == "GRU", 2 * rnn.hidden_size

    def without_other_gates(grad: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(grad[:inside]), grad[inside:]])

    for name, bias in rnn.named_parameters(recurse=False):
        if "bias_hh" in name:
            bias[: inside if is_gru else None] = 0
            bias.requires_grad_(is_gru)
            if is_gru:
                bias.register_hook(without_other_gates)


class Dropout(nn.Dropout):
    """:class:`torch.nn.Dropout` of (T, B, F), or packed; ``kind="locked"``: one mask per sequence.

    >>> import torch
    >>> out = Dropout(0.5, "locked")(torch.ones(3, 2, 8))
    >>> torch.equal(out[0], out[2])
    True
    """

    def __init__(self, p: float = 0.5, kind: Literal["element", "locked"] = "element"):
        super().__init__(p)
        self.kind = kind

    def forward(self, input: Any) -> Any:
        if not self.training or self.p == 0:
            return input
        packed = isinstance(input, PackedSequence)
        rows = input.data if packed else input.flatten(0, 1)
        if self.kind == "element":
            rows = F.dropout(rows, self.p)
        else:
            steps = Steps.packed(input.batch_sizes) if packed else Steps.dense(*input.shape[:2])
            rows = locked_dropout(rows, steps, self.p)
        return input._replace(data=rows) if packed else rows.view_as(input)


class SequenceModel(nn.Module):
    """Recurrent layers, dropout between them and before a linear head, softmax.

    `options` are arguments of the layers: norm, gamma, eps, peephole, zoneout, ...
    """

    mean: Tensor
    """Mean (I,) of the features."""
    scale: Tensor
    """Factors (I,) of the features without their mean."""
    counts_errors = True

    def __init__(
        self,
        inputs: int,
        outputs: int,
        hidden: int,
        layers: int,
        *,
        cell: Literal["lstm", "rnn", "gru", "ligru"] = "lstm",
        norm: Any = None,
        bidirectional: bool = False,
        dropout: float = 0.0,
        dropout_kind: Literal["element", "locked"] = "element",
        **options: Any,
    ) -> None:
        super().__init__()
        if cell != "lstm":
            options.pop("peephole", None)
        if not norms.get(norm).takes_time_steps:
            options.pop("time_steps", None)
        # The numbers that torch draws for a layer depend on its norm; `glorot` draws all again.
        with torch.random.fork_rng([]):
            self.dropout = Dropout(dropout, dropout_kind)
            self.rnn = {"lstm": LSTM, "rnn": RNN, "gru": GRU, "ligru": LiGRU}[cell](
                inputs,
                hidden,
                layers,
                dropout=dropout if layers > 1 else 0.0,  # torch warns about one layer
                dropout_kind=dropout_kind,
                bidirectional=bidirectional,
                norm=norm,
                **options,
            )
            self.decoder = nn.Linear((1 + bidirectional) * hidden, outputs)

    def glorot(self) -> None:
        """Draw the weights: Glorot per gate, zero biases. γ and β keep their values."""
        glorot_(self.rnn, self.decoder, generators_by_name())
        train_one_bias(self.rnn)

    def standardised(self, sequences: Sequences) -> Any:
        """Return the sequences with standardised features."""
        if isinstance(sequences, PackedSequence):
            return sequences._replace(data=(sequences.data - self.mean) * self.scale)
        return (sequences - self.mean) * self.scale

    def features(self, inputs: Any, state: State | None = None) -> tuple[Tensor, State | None]:  # noqa: ARG002
        """Return what the head sees, rows (N, D·H), and the state after the last step."""
        output = self.dropout(self.rnn(self.standardised(inputs))[0])
        rows = output.data if isinstance(output, PackedSequence) else output.flatten(0, 1)
        return rows, None

    def loss(self, inputs: Any, targets: Tensor, state: State | None = None) -> Loss:
        """Return the cross entropy of the targets in nats, without keeping logits."""
        rows, state = self.features(inputs, state)
        weight, bias, count = self.decoder.weight, self.decoder.bias, self.counts_errors
        nats, errors = nats_and_errors(rows, weight, bias, targets.flatten(), count_errors=count)
        return Loss(nats, errors if count else None, state=state)
