"""The language models of section 5.2, Zaremba's stacked LSTM, and of the appendix."""

from typing import Literal

import torch
from torch import Tensor, nn

from normrnn.deploy.parts import Parts, Recurrent
from normrnn.engine.dropout import Dropout
from normrnn.engine.initial import generators_by_name, glorot_
from normrnn.engine.loss import linear_cross_entropy
from normrnn.nn import GRU, LSTM, RNN
from normrnn.text.vocabulary import Vocabulary

State = tuple[Tensor, ...]
"""(h, c) of an LSTM, (h,) of the others."""


class LanguageModel(nn.Module):
    """Lookup table, recurrent stack and softmax, dropout between all of them.

    Shapes: tokens (T, B), logits (T, B, C), state one or two tensors of (layers, B, H).

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
        cell: Literal["lstm", "rnn", "gru"] = "lstm",
        embedding: int | None = None,
        dropout: float = 0.0,
        dropout_kind: Literal["element", "locked"] = "element",
        weight_drop: float = 0.0,
        zoneout: tuple[float, float] = (0.0, 0.0),
        norm: str | None = None,
        peephole: Literal["output", "all"] | None = None,
        gamma: float | None = None,
        eps: float = 1e-5,
        momentum: float = 0.1,
        shrinkage: float = 0.0,
        time_steps: int | None = None,
        init: float | Literal["glorot"] = 0.1,
    ) -> None:
        super().__init__()
        embedding = embedding or hidden
        kind = {"lstm": LSTM, "rnn": RNN, "gru": GRU}[cell]
        # What torch draws for a layer depends on its norm; all of it is drawn again below.
        with torch.random.fork_rng([]):
            self.embedding = nn.Embedding(vocab_size, embedding)
            self.dropout = Dropout(dropout, dropout_kind)
            self.rnn = kind(
                embedding,
                hidden,
                layers,
                # torch's own argument: between layers only, and a warning without a between.
                dropout=dropout if layers > 1 else 0.0,
                dropout_kind=dropout_kind,
                weight_drop=weight_drop,
                zoneout=zoneout,
                norm=norm,
                gamma=gamma,
                eps=eps,
                momentum=momentum,
                shrinkage=shrinkage,
                time_steps=time_steps,
                **({"peephole": peephole} if peephole else {}),
            )
            self.decoder = nn.Linear(hidden, vocab_size)
        self.reset_parameters(init)

    def reset_parameters(self, init: float | Literal["glorot"]) -> None:
        """Draw all weights from U(-init, init), or as in the appendix: the lookup table from
        N(0, 1), Glorot's values for other matrices, biases 0. γ and β keep their values."""
        generators = generators_by_name()
        if init == "glorot":
            nn.init.normal_(self.embedding.weight, generator=generators("embedding.weight"))
            glorot_(self.rnn, self.decoder, generators)
        else:
            normalisers = {id(p) for child in self.rnn.children() for p in child.parameters()}
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    if "bias_hh" not in name and id(parameter) not in normalisers:
                        parameter.uniform_(-init, init, generator=generators(name))
        self.rnn.train_one_bias()

    def features(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """What the softmax sees, (T, B, H), and the state after the last step."""
        lstm = self.rnn.mode == "LSTM"
        start = state if lstm or state is None else state[0]
        output, after = self.rnn(self.dropout(self.embedding(tokens)), start)
        return self.dropout(output), after if lstm else (after,)

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

    def plain_parts(self) -> Parts:
        """The network as plain numbers, for elsewhere."""
        notes = {} if self.vocabulary is None else {"vocabulary": self.vocabulary.to_json()}
        recurrent, table = Recurrent(self.rnn), self.embedding.weight.detach()
        return Parts(recurrent, self.decoder, embedding=table, notes=notes)
