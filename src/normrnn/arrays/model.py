"""A recurrent stack with a linear head, on every step or on the last state."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from normrnn.arrays.config import ArrayConfig
from normrnn.engine.dropout import Dropout
from normrnn.engine.initial import generators_by_name, glorot_
from normrnn.engine.loss import nats_and_errors
from normrnn.nn import GRU, LSTM, RNN
from normrnn.runs.environment import built

Sequences = Tensor | PackedSequence
"""(T, B, F) of equal lengths, or packed, longest first."""


class ArrayModel(nn.Module):
    """Standardised features, recurrent layers, and a linear head.

    Buffers: `mean` and `scale` (F,) of the features, `target_mean` and `target_scale` (O,) of
    values. The head sees every step, or the last state of both directions.
    """

    mean: Tensor
    scale: Tensor
    target_mean: Tensor
    target_scale: Tensor

    def __init__(
        self, config: ArrayConfig, features: int, outputs: int, time_steps: int = 0
    ) -> None:
        super().__init__()
        m, norm = config.model, config.normalisation
        self.per_step = config.target_per == "step"
        self.values = config.target == "values"
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        self.register_buffer("target_mean", torch.zeros(outputs))
        self.register_buffer("target_scale", torch.ones(outputs))
        options = m.options(norm)
        options["dropout"] = m.dropout if m.layers > 1 else 0.0
        if m.cell != "lstm":
            del options["peephole"]
        if norm.takes_time_steps and time_steps:
            options["time_steps"] = time_steps
        kind = {"lstm": LSTM, "rnn": RNN, "gru": GRU}[m.cell]
        # What torch draws for a layer depends on its norm; all of it is drawn again below.
        with torch.random.fork_rng([]):
            self.rnn = kind(features, m.hidden, m.layers, bidirectional=m.bidirectional, **options)
            self.dropout = Dropout(m.dropout, m.dropout_kind)
            self.decoder = nn.Linear((1 + m.bidirectional) * m.hidden, outputs)
        glorot_(self.rnn, self.decoder, generators_by_name())
        self.rnn.train_one_bias()

    def features(self, x: Sequences) -> Tensor:
        """Return what the head sees: rows (N, D·H) of all steps, or (B, D·H)."""
        if isinstance(x, PackedSequence):
            x = x._replace(data=(x.data - self.mean) * self.scale)
        else:
            x = (x - self.mean) * self.scale
        output, state = self.rnn(x)
        if self.per_step:
            dropped = self.dropout(output)
            return dropped.data if isinstance(dropped, PackedSequence) else dropped.flatten(0, 1)
        last = state[0] if isinstance(state, tuple) else state
        directions = 1 + self.rnn.bidirectional
        h = last[-directions:].transpose(0, 1).flatten(1)
        return self.dropout(h[None])[0]

    def forward(self, x: Sequences) -> Tensor:
        """Return logits, or values in the units of the targets, per step or per sequence."""
        output = self.decoder(self.features(x))
        return output * self.target_scale + self.target_mean if self.values else output

    def loss(self, x: Sequences, targets: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the summed loss, the number of errors of classes, and what is differentiated.

        The loss of values is the squared error in the units of the targets, averaged over outputs;
        the standardised error is differentiated.
        """
        rows = self.features(x)
        if not self.values:
            nats, errors = nats_and_errors(rows, self.decoder.weight, self.decoder.bias, targets)
            return nats, errors, nats
        output = self.decoder(rows).float()
        wanted = (targets.reshape(len(output), -1) - self.target_mean) / self.target_scale
        squared = (output - wanted).square()
        total = (squared.detach() * self.target_scale.square()).mean(1).sum()
        return total, None, squared.mean(1).sum()


def build_model(config: ArrayConfig, features: int, outputs: int, time_steps: int) -> ArrayModel:
    """Return the network of the config, freshly initialised."""
    return built(partial(ArrayModel, config, features, outputs, time_steps))
