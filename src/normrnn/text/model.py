"""The language models of section 5.2, Zaremba's stacked LSTM, and of the appendix."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from normrnn.deploy.networks import Exportable
from normrnn.engine.loss import State
from normrnn.engine.model import SequenceModel, generators_by_name, glorot_, train_one_bias


class LanguageModel(SequenceModel):
    """Lookup table, recurrent layers and softmax, dropout between all of them.

    Shapes: tokens (T, B), logits (T, B, C), state one or two tensors of (layers, B, H): (h, c) of
    an LSTM, (h,) of the others. `options` are those of `SequenceModel`.

    Weights are drawn from U(-init, init), or as in the appendix: the lookup table from N(0, 1),
    Glorot's values for other matrices, biases 0. γ and β keep their values.

    >>> model = LanguageModel(10, hidden=8, norm="frame")
    >>> logits, state = model(torch.zeros(5, 4, dtype=torch.long))
    >>> logits.shape
    torch.Size([5, 4, 10])
    """

    counts_errors = False
    vocabulary: Any = None
    """The `Vocabulary` that says what the ids mean, where known."""

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        layers: int = 2,
        *,
        embedding: int | None = None,
        init: float | Literal["glorot"] = 0.1,
        **options: Any,
    ) -> None:
        embedding = embedding or hidden
        super().__init__(embedding, vocab_size, hidden, layers, **options)
        with torch.random.fork_rng([]):
            self.embedding = nn.Embedding(vocab_size, embedding)
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
        train_one_bias(self.rnn)

    def outputs(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return what the softmax sees, (T, B, H), and the state after the last step."""
        is_lstm = self.rnn.mode == "LSTM"
        start = state if is_lstm or state is None else state[0]
        output, after = self.rnn(self.dropout(self.embedding(tokens)), start)
        return self.dropout(output), after if is_lstm else (after,)

    def features(self, inputs: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return the same as rows (T·B, H)."""
        output, state = self.outputs(inputs, state)
        return output.flatten(0, 1), state

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return logits (T, B, C) of the tokens that follow, and the state after the last step."""
        output, state = self.outputs(tokens, state)
        return self.decoder(output), state

    def exportable(self) -> Exportable:
        """Return the network as a function of tensors."""
        rnn, names = self.rnn, ("h", "c") if self.rnn.mode == "LSTM" else ("h",)
        # Separate tensors: torch.export merges two arguments that are one tensor.
        state = [torch.zeros(rnn.num_layers, 2, rnn.hidden_size) for _ in names]
        return Exportable(
            _Exported(self),
            (torch.zeros(5, 2, dtype=torch.long), *state),
            {"tokens": {0: "T", 1: "B"}} | {f"{name}0": {1: "B"} for name in names},
            ("logits", *(f"{name}n" for name in names)),
            {} if self.vocabulary is None else {"vocabulary": self.vocabulary.to_json()},
            _USAGE,
        )


class _Exported(nn.Module):
    """A language model as a function: tokens (T, B), h0[, c0] -> logits (T, B, C), hn[, cn]."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.embedding, self.rnn, self.decoder = model.embedding, model.rnn, model.decoder

    def forward(self, tokens: Tensor, h0: Tensor, c0: Tensor | None = None) -> tuple[Tensor, ...]:
        output, after = self.rnn(self.embedding(tokens), h0 if c0 is None else (h0, c0))
        return self.decoder(output), *((after,) if c0 is None else after)


_USAGE = """
tokens = torch.zeros(5, 2, dtype=torch.long)  # ids (T, B); notes["vocabulary"] says what they mean
output, state = model.rnn(model.embedding(tokens))  # pass the state with the next tokens
logits = model.decoder(output)  # (T, B, symbols)
"""
