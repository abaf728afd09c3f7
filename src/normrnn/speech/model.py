"""The acoustic model of section 5.1: a stack of bidirectional LSTMs over whole utterances."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from normrnn.deploy.networks import Exportable
from normrnn.engine.model import SequenceModel


class AcousticModel(SequenceModel):
    """Global mean and variance normalisation, LSTM stack, softmax over the alignment's states.

    Works on rows: the data (N, D) of a `PackedSequence`, N unpadded frames, step by step.
    Buffers hold what the training set says about features and states: `mean` and `variance` (D,),
    `label_counts` (C,). `options` are those of `SequenceModel`.

    >>> model = AcousticModel(dim=3, classes=5, hidden=4, layers=2, norm="sequence")
    >>> model(pack_sequence([torch.randn(7, 3), torch.randn(4, 3)])).shape
    torch.Size([11, 5])
    """

    variance: Tensor
    label_counts: Tensor

    def __init__(self, dim: int, classes: int, *, bidirectional: bool = True, **options: Any):
        super().__init__(dim, classes, bidirectional=bidirectional, **options)
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("variance", torch.ones(dim))
        self.register_buffer("label_counts", torch.ones(classes, dtype=torch.long))
        self.glorot()

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """Factors (D,) of the features without their mean."""
        # The clamp keeps rounding errors of a constant feature small.
        return self.variance.clamp(min=1e-8).rsqrt()

    def forward(self, utterances: PackedSequence) -> Tensor:
        """Return logits of the states, rows (N, C)."""
        return self.decoder(self.features(utterances)[0])

    def log_posteriors(self, features: Tensor) -> Tensor:
        """Return log posteriors of the states (T, C) for the features (T, D) of an utterance."""
        return self(pack_sequence([features])).log_softmax(1)

    def log_priors(self, floor: float = 1.0) -> Tensor:
        """Return logs of the states' shares (C,) of the training frames; each state counts as seen
        in at least `floor` frames, so that none gets an infinite likelihood."""
        counts = self.label_counts.double().clamp(min=floor)
        return (counts / counts.sum()).log().float()

    def read_piece(self, features: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return log posteriors (T, B, C) of a piece of utterances, and the state after it."""
        output, state = self.rnn(self.standardised(features), state)
        return self.decoder(output).log_softmax(-1), state

    def exportable(self) -> Exportable:
        """Return the network as a function of tensors."""
        return Exportable(
            _Exported(self),
            (torch.zeros(50, 2, len(self.mean)), torch.tensor([50, 30])),
            {"features": {0: "T", 1: "B"}, "lengths": {0: "B"}},
            ("log_posteriors",),
            usage=_USAGE.format(F=len(self.mean)),
        )


class _Exported(nn.Module):
    """A function: features (T, B, F), lengths (B,) -> log posteriors (T, B, C), 0 in padding."""

    mean: Tensor
    scale: Tensor

    def __init__(self, model: AcousticModel) -> None:
        super().__init__()
        self.register_buffer("mean", model.mean)
        self.register_buffer("scale", model.scale)
        self.rnn, self.decoder = model.rnn, model.decoder

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        output, _ = self.rnn((features - self.mean) * self.scale, lengths=lengths)
        time = torch.arange(features.shape[0], device=features.device)
        inside = (time[:, None] < lengths)[:, :, None]
        return torch.where(inside, self.decoder(output).log_softmax(-1), 0.0)


_USAGE = """
features, lengths = torch.randn(50, 2, {F}), [50, 30]  # padded (T, B, F)
rows = (features - values["mean"]) * values["scale"]
packed = torch.nn.utils.rnn.pack_padded_sequence(rows, lengths, enforce_sorted=False)
output, _ = torch.nn.utils.rnn.pad_packed_sequence(model.rnn(packed)[0])
log_posteriors = model.decoder(output).log_softmax(-1)  # (T, B, states)
"""
