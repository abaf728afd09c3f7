"""The acoustic model of section 5.1: a stack of bidirectional LSTMs over whole utterances."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from normrnn.deploy.parts import Parts, Recurrent
from normrnn.engine.dropout import Dropout
from normrnn.engine.initial import generators_by_name, glorot_
from normrnn.engine.loss import nats_and_errors
from normrnn.nn import LSTM
from normrnn.speech import padding


class AcousticModel(nn.Module):
    """Global mean and variance normalisation, LSTM stack, softmax over the alignment's states.

    Works on rows: the data (N, D) of a `PackedSequence`, N unpadded frames, step by step.
    What the training set says about features and states travels with the weights: `mean` and
    `variance` (D,), `label_counts` (C,).

    >>> model = AcousticModel(dim=3, classes=5, hidden=4, layers=2, norm="sequence")
    >>> model(pack_sequence([torch.randn(7, 3), torch.randn(4, 3)])).shape
    torch.Size([11, 5])
    """

    mean: Tensor
    variance: Tensor
    label_counts: Tensor

    def __init__(
        self,
        dim: int,
        classes: int,
        hidden: int = 250,
        layers: int = 5,
        *,
        bidirectional: bool = True,
        norm: Any = None,
        peephole: Literal["output", "all"] | None = None,
        gamma: float | None = None,
        eps: float = 1e-5,
        momentum: float = 0.1,
        shrinkage: float = 0.0,
        count_padding: bool = False,
        dropout: float = 0.0,
        dropout_kind: Literal["element", "locked"] = "element",
        weight_drop: float = 0.0,
        zoneout: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("variance", torch.ones(dim))
        self.register_buffer("label_counts", torch.ones(classes, dtype=torch.long))
        # What torch draws for a layer depends on its norm; all of it is drawn again below.
        with torch.random.fork_rng([]):
            self.rnn = LSTM(
                dim,
                hidden,
                layers,
                dropout=dropout if layers > 1 else 0.0,
                dropout_kind=dropout_kind,
                weight_drop=weight_drop,
                zoneout=zoneout,
                bidirectional=bidirectional,
                norm=norm,
                peephole=peephole,
                gamma=gamma,
                eps=eps,
                momentum=momentum,
                shrinkage=shrinkage,
            )
            self.dropout = Dropout(dropout, dropout_kind)
            if count_padding:
                padding.count_padding(self.rnn)
            self.decoder = nn.Linear((1 + bidirectional) * hidden, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot per gate, zero biases, γ and β left alone, one trained bias per gate."""
        glorot_(self.rnn, self.decoder, generators_by_name())
        self.rnn.train_one_bias()

    @property
    def scale(self) -> Tensor:
        """What features (D,) are multiplied by, their mean taken off."""
        # A feature that never varies carries nothing; what is left of it must not blow up.
        return self.variance.clamp(min=1e-8).rsqrt()

    def features(self, utterances: PackedSequence) -> Tensor:
        """What the softmax sees, rows (N, directions · H)."""
        rows = (utterances.data - self.mean) * self.scale
        return self.dropout(self.rnn(utterances._replace(data=rows))[0]).data

    def forward(self, utterances: PackedSequence) -> Tensor:
        """Logits of the states, rows (N, C)."""
        return self.decoder(self.features(utterances))

    def loss(self, utterances: PackedSequence, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy of `targets`, rows (N,), summed in nats, and the number of wrong frames."""
        rows = self.features(utterances)
        return nats_and_errors(rows, self.decoder.weight, self.decoder.bias, targets)

    def log_posteriors(self, features: Tensor) -> Tensor:
        """Natural logs of the states' posteriors (T, C) for the features (T, D) of an utterance."""
        return next(self.each_log_posteriors([features]))

    def each_log_posteriors(self, utterances: Sequence[Tensor]) -> Iterator[Tensor]:
        """The same for utterances that run through the stack together, in their order.

        The softmax is taken one by one: many states over many frames would not fit.
        """
        packed = pack_sequence(list(utterances), enforce_sorted=False)
        for rows in unpack_sequence(packed._replace(data=self.features(packed))):
            yield F.log_softmax(self.decoder(rows), dim=1)

    def log_priors(self, floor: float = 1.0) -> Tensor:
        """Natural logs of the states' shares (C,) of the training frames, counts below `floor`
        raised to it: a state never seen must not get an infinite likelihood."""
        counts = self.label_counts.double().clamp(min=floor)
        return (counts / counts.sum()).log().float()

    def plain_parts(self) -> Parts:
        """The network as plain numbers, for elsewhere."""
        recurrent = Recurrent(self.rnn)
        return Parts(recurrent, self.decoder, mean=self.mean, scale=self.scale)
