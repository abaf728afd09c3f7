"""Recurrent layers with a linear head: what the networks of all tasks share."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from normrnn.engine.dropout import Dropout
from normrnn.engine.initial import generators_by_name, glorot_, train_one_bias
from normrnn.engine.loss import nats_and_errors
from normrnn.engine.task import Loss, State
from normrnn.nn import GRU, LSTM, RNN, LiGRU

Sequences = Tensor | PackedSequence
"""(T, B, I) of equal lengths, or packed, longest first."""


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
        head = self.decoder.weight, self.decoder.bias
        count = self.counts_errors
        nats, errors = nats_and_errors(rows, *head, targets.flatten(), count_errors=count)
        return Loss(nats, errors if count else None, state=state)
