"""A recurrent stack with a linear head, on every step or on the last state."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from normrnn.arrays.config import ArrayConfig
from normrnn.deploy.networks import Exportable
from normrnn.engine.loss import Loss, State
from normrnn.engine.model import SequenceModel, Sequences


class ArrayModel(SequenceModel):
    """Standardised features, recurrent layers, and a linear head.

    Buffers: `mean` and `scale` (F,) of the features, `target_mean` and `target_scale` (O,) of
    values. The head sees every step, or the last state of both directions.
    """

    target_mean: Tensor
    target_scale: Tensor

    def __init__(
        self, config: ArrayConfig, features: int, outputs: int, time_steps: int = 0
    ) -> None:
        m = config.model
        options = {"time_steps": time_steps or None, **m.options(config.normalisation)}
        super().__init__(features, outputs, bidirectional=m.bidirectional, **options)
        self.per_step = config.target_per == "step"
        self.values = config.target == "values"
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        self.register_buffer("target_mean", torch.zeros(outputs))
        self.register_buffer("target_scale", torch.ones(outputs))
        self.glorot()

    def features(self, inputs: Sequences, state: State | None = None) -> tuple[Tensor, None]:  # noqa: ARG002
        """Return what the head sees: rows (N, D·H) of all steps, or (B, D·H)."""
        output = self._seen(inputs)
        if isinstance(output, PackedSequence):
            return output.data, None
        return output.flatten(0, -2), None

    def _seen(self, inputs: Sequences, lengths: Tensor | None = None) -> Any:
        """Return the output of every step, (T, B, D·H) or packed, or the last state (B, D·H)."""
        options = {} if lengths is None else {"lengths": lengths}
        output, state = self.rnn(self.standardised(inputs), **options)
        if self.per_step:
            return self.dropout(output)
        last = state[0] if isinstance(state, tuple) else state
        h = last[-(1 + self.rnn.bidirectional) :].transpose(0, 1).flatten(1)
        return self.dropout(h[None])[0]

    def forward(self, features: Sequences, lengths: Tensor | None = None) -> Tensor:
        """Return logits, or values in the units of the targets, per step or per sequence.

        `features` are padded (T, B, F) with `lengths` (B,), or packed; then steps are rows (N, O).
        """
        seen = self._seen(features, lengths)
        output = self.decoder(seen.data if isinstance(seen, PackedSequence) else seen)
        return output * self.target_scale + self.target_mean if self.values else output

    def loss(self, inputs: Sequences, targets: Tensor, state: State | None = None) -> Loss:
        """Return the cross entropy, or the squared error in the units of the targets, averaged over
        outputs; the standardised error is differentiated."""
        if not self.values:
            return super().loss(inputs, targets, state)
        output = self.decoder(self.features(inputs)[0]).float()
        wanted = (targets.reshape(len(output), -1) - self.target_mean) / self.target_scale
        squared = (output - wanted).square()
        total = (squared.detach() * self.target_scale.square()).mean(1).sum()
        return Loss(total, objective=squared.mean(1).sum())

    def exportable(self) -> Exportable:
        """Return the network with arguments to trace `forward` with."""
        example = torch.zeros(5, 3, len(self.mean)), torch.tensor([5, 4, 2])
        return Exportable(self, example, {"features": {0: "T", 1: "B"}, "lengths": {0: "B"}})
