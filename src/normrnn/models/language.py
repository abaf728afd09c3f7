"""The language model of section 5.2: Zaremba's stacked LSTM with normalised layers."""

from typing import Literal

import torch
from torch import Tensor, nn

from normrnn.data.vocabulary import Vocabulary
from normrnn.models.loss import linear_cross_entropy
from normrnn.nn import LSTM

State = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """Lookup table, LSTM stack and softmax, dropout between all of them.

    Shapes: tokens (T, B), logits (T, B, C), state two tensors of (layers, B, H).

    >>> model = LanguageModel(10, hidden=8, norm="frame")
    >>> logits, state = model(torch.zeros(5, 4, dtype=torch.long))
    >>> logits.shape
    torch.Size([5, 4, 10])
    """

    vocabulary: Vocabulary | None = None
    """What the ids mean, where known."""

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        layers: int = 2,
        *,
        embedding: int | None = None,
        dropout: float = 0.0,
        norm: Literal["sequence", "frame", "hidden"] | None = None,
        peephole: Literal["output", "all"] | None = None,
        gamma: float = 1.0,
        eps: float = 1e-5,
        momentum: float = 0.1,
        time_steps: int | None = None,
        init: float = 0.1,
    ) -> None:
        super().__init__()
        embedding = embedding or hidden
        self.embedding = nn.Embedding(vocab_size, embedding)
        self.dropout = nn.Dropout(dropout)
        self.rnn = LSTM(
            embedding,
            hidden,
            layers,
            # torch's own argument: between layers only, and a warning when there is no between.
            dropout=dropout if layers > 1 else 0.0,
            norm=norm,
            peephole=peephole,
            gamma=gamma,
            eps=eps,
            momentum=momentum,
            time_steps=time_steps,
        )
        self.decoder = nn.Linear(hidden, vocab_size)
        self.reset_parameters(init)

    def reset_parameters(self, init: float) -> None:
        """All weights from U(-init, init), γ and β left alone, one trained bias per gate.

        torch's two biases get the same gradient, so together they would learn at twice the rate
        of β: `bias_hh` stays at zero, as far as there is one.
        """
        normalisers = {id(p) for child in self.rnn.children() for p in child.parameters()}
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "bias_hh" in name:
                    parameter.zero_().requires_grad_(False)
                elif id(parameter) not in normalisers:
                    parameter.uniform_(-init, init)

    def features(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """What the softmax sees, (T, B, H), and the state after the last step."""
        output, after = self.rnn(self.dropout(self.embedding(tokens)), state)
        return self.dropout(output), after

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits (T, B, C) of the tokens that follow, and the state after the last step."""
        features, state = self.features(tokens, state)
        return self.decoder(features), state

    def loss(
        self, tokens: Tensor, targets: Tensor, state: State | None = None
    ) -> tuple[Tensor, State]:
        """Summed cross entropy of `targets` (T, B) in nats, without keeping logits; the state."""
        features, state = self.features(tokens, state)
        nats = linear_cross_entropy(
            features.flatten(0, 1), self.decoder.weight, self.decoder.bias, targets.flatten()
        )
        return nats, state
