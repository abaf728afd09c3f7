"""Language modelling: the next token, in windows of a text.

Windows are of contiguous streams (section 5.2) or of fixed sequences (the appendix). In both every
token but the first is predicted exactly once. Training reads windows of the full batch only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normrnn.deploy.networks import Exportable
from normrnn.deploy.stream import Stream
from normrnn.engine import model as networks
from normrnn.engine.model import CHUNK_ROWS, State
from normrnn.engine.ranks import ALONE, Ranks
from normrnn.engine.task import Batch, Models, Split, Task, Tensors
from normrnn.errors import UserError
from normrnn.nn.recalibrate import eval_mode
from normrnn.norms import get
from normrnn.runs.environment import named_device
from normrnn.runs.records import Row
from normrnn.runs.store import RunDirectory
from normrnn.text.config import LanguageConfig
from normrnn.text.corpus import Corpus, Vocabulary, read_corpus


class LanguageModel(networks.SequenceModel):
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
    vocabulary: Any = None  # the `Vocabulary` that says what the ids mean, where known

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
        generators = networks.generators_by_name()
        if init == "glorot":
            nn.init.normal_(self.embedding.weight, generator=generators("embedding.weight"))
            networks.glorot_(self.rnn, self.decoder, generators)
        else:
            normalisers = {id(p) for child in self.rnn.children() for p in child.parameters()}
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    if "bias_hh" not in name and id(parameter) not in normalisers:
                        parameter.uniform_(-init, init, generator=generators(name))
        networks.train_one_bias(self.rnn)

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


VOCABULARY = "vocabulary"  # entry in the header of model.safetensors
LONG_WINDOW = 2000
"""Steps per window where its length does not matter: one stream is slow in short ones."""


@dataclass(frozen=True)
class Window:
    """`length` tokens from each of `starts` (B,)."""

    starts: Tensor
    length: int
    streams: int
    """Rows that ranks share: a rank keeps its streams where only the first ones have a window."""
    ends: Tensor | None = None
    """Where a stream ends (B,) and continues `period` tokens before."""
    period: int = 0

    def __len__(self) -> int:
        """Return the number of rows, B."""
        return len(self.starts)

    def read(self, ids: Tensor, ranks: Ranks = ALONE) -> tuple[Tensor, Tensor]:
        """Return the tokens and those that follow them, both (T, B), of this rank's share."""
        share = ranks.share(self.streams)
        at = self.starts[share] + torch.arange(self.length)[:, None]
        if self.ends is not None:
            at = torch.where(at < self.ends[share], at, at - self.period)
        return ids[at].long(), ids[at + 1].long()


def stream_windows(tokens: int, batch: int, steps: int, seed: int | None = None) -> list[Window]:
    """Return the windows of a text of N tokens as B contiguous streams; with a `seed`, which
    determines where in its part of the text each stream begins.

    The N - 1 positions rarely divide by B: the first r = (N - 1) mod B streams are one position
    longer, which is a last window of one step.

    >>> [w.read(torch.arange(8))[0].tolist() for w in stream_windows(tokens=8, batch=3, steps=2)]
    [[[0, 3, 5], [1, 4, 6]], [[2]]]
    """
    length, longer = divmod(tokens - 1, batch)
    b = torch.arange(batch)
    starts = b * length + b.clamp(max=longer)
    parts = [(at, min(steps, length - at)) for at in range(0, length, steps)]
    if seed is None:
        windows = [Window(starts + at, size, batch) for at, size in parts]
    else:
        first = torch.randint(length, (batch,), generator=torch.Generator().manual_seed(seed))
        shared = batch, starts + length, length
        windows = [Window(starts + (first + at) % length, size, *shared) for at, size in parts]
    if longer:
        windows.append(Window(starts[:longer] + length, 1, batch))
    return windows


def sequences(tokens: int, batch: int, steps: int, seed: int | None = None) -> list[Window]:
    """Return the windows of a text of N tokens as sequences, B at a time, the shorter rest alone;
    with a `seed`, which determines an order of the sequences.

    >>> [w.read(torch.arange(8))[0].T.tolist() for w in sequences(tokens=8, batch=2, steps=3)]
    [[[0, 1, 2], [3, 4, 5]], [[6]]]
    """
    whole, rest = divmod(tokens - 1, steps)
    order = torch.arange(whole)
    if seed is not None:
        order = torch.randperm(whole, generator=torch.Generator().manual_seed(seed))
    windows = [Window(some * steps, steps, len(some)) for some in order.split(batch) if len(some)]
    if rest:
        windows.append(Window(torch.tensor([whole * steps]), rest, 1))
    return windows


class LanguageTask(Task):
    """Cross entropy of the next token."""

    config: LanguageConfig
    model: LanguageModel
    splits = ("valid", "test")
    validates_all_statistics = True

    def __init__(self, config: LanguageConfig, corpus: Corpus | None = None) -> None:
        corpus = corpus or read_corpus(config.data, config.text)
        source = f"{corpus.where}: {corpus.summary}"
        super().__init__(config, corpus.sha256, corpus.where, source)
        evaluation = config.evaluation
        self.sizes = {"vocabulary": corpus.vocabulary}
        self.metadata = {VOCABULARY: corpus.vocabulary.to_json()}
        self.carries_state = config.train.reading == "streams"
        self.calibration_batches = evaluation.recalibrate_windows
        self.has_train_eval = evaluation.train_tokens > 0
        limit = evaluation.tokens + 1 if evaluation.tokens else None
        held_out = {"valid": corpus.valid[:limit], "test": corpus.test[:limit]}
        self.texts = {"train": corpus.train, **held_out}
        if self.has_train_eval:
            self.texts["train_eval"] = corpus.train[: evaluation.train_tokens + 1]
        self._windows = {split: self.windows(split) for split in self.texts}
        for split, every in self._windows.items():
            if not every:
                raise UserError(
                    f"{self.where}: the {split} text has {len(self.texts[split])} tokens, too few"
                    f" for a batch of {self.rows_at_once(split)} {config.train.reading}"
                )
        m, last = config.model, self._windows["train"][-1]
        rows = last.read(corpus.train, self.ranks)[0].numel()
        features = max(m.hidden, m.embedding)
        if config.normalisation.more_rows_than_features and not m.shrinkage and rows <= features:
            raise UserError(
                f"norm {config.norm} needs more tokens in every update than its {features}"
                f" features, and the last one of this text has {rows}: set model.shrinkage above 0,"
                " or another train.steps"
            )

    @classmethod
    def open(cls, config: LanguageConfig, model: LanguageModel | None = None) -> "LanguageTask":
        """Read the texts of a config, in the ids of a model to evaluate."""
        known = None if model is None else model.vocabulary
        return cls(config, read_corpus(config.data, config.text, known))

    @classmethod
    def network(cls, config: LanguageConfig, *, vocabulary: Vocabulary) -> LanguageModel:
        """Make a network."""
        m = config.model
        model = LanguageModel(
            len(vocabulary),
            embedding=m.embedding or None,
            **m.options(config.normalisation),
            time_steps=m.time_steps or None,
            init=m.init if m.initialiser == "uniform" else m.initialiser,
        )
        model.vocabulary = vocabulary
        return model

    @classmethod
    def saved_sizes(cls, weights: Tensors, metadata: Mapping[str, str]) -> dict[str, Any]:  # noqa: ARG003
        """Return the vocabulary of a saved network."""
        return {"vocabulary": Vocabulary.from_json(metadata.get(VOCABULARY, ""))}

    def rows_at_once(self, split: Split) -> int:
        """Return the training batch's number of streams, fewer for a very short held-out text."""
        batch = self.config.train.batch
        return batch if split == "train" else min(batch, max(1, len(self.texts[split]) - 1))

    def windows(self, split: Split, seed: int | None = None) -> list[Window]:
        """Return the windows of a text; a seed determines where streams begin, or the order of
        sequences."""
        sizes = len(self.texts[split]), self.rows_at_once(split), self.config.train.steps
        windows = (stream_windows if self.carries_state else sequences)(*sizes, seed)
        return windows if split != "train" else [w for w in windows if len(w) == sizes[1]]

    def batches(self, split: Split, epoch: int = 0) -> Sequence[Window]:
        """Return the windows of a text; of the training text those of an epoch."""
        if split != "train":
            return self._windows[split]
        train = self.config.train
        every = self._windows["train"]
        if train.shift_streams or not self.carries_state:
            every = self.windows("train", self.config.seed * 1_000_003 + epoch)
        tokens = train.epoch_tokens
        return every[: max(1, tokens // (train.batch * train.steps))] if tokens else every

    def batch(self, split: Split, key: Window, ranks: Ranks = ALONE) -> Batch:
        """Read a rank's streams of a window."""
        inputs, targets = (x.to(self.device) for x in key.read(self.texts[split], ranks))
        is_full = (key.length, len(key)) == (self.config.train.steps, self.rows_at_once(split))
        inputs = inputs if inputs.numel() else None
        return Batch(inputs, targets, key.length * len(key), len(key), is_full)

    def score(self, model: Any, split: Split, *arguments: Any, **options: Any) -> Row:
        """Return a row with the number of streams."""
        row = super().score(model, split, *arguments, **options)
        return {**row, "streams": self.rows_at_once(split)}

    def calibration(self) -> Iterable[Window]:
        """Return training windows in the order of the text."""
        return self._windows["train"]

    def extra_rows(self, models: Models) -> list[Row]:
        """Read the test text as one stream; sequences from zero state are the same anyway."""
        if not self.carries_state:
            return []
        # Statistics per position belong to those in the training window.
        steps = self.config.train.steps if self.config.model.time_steps else LONG_WINDOW
        one = stream_windows(len(self.texts["test"]), 1, steps)
        rows = []
        for kind, model in models.items():
            row = {**self.score(model, "test", kind, one), "streams": 1}
            del row["batch_ppl"]  # a mean over windows of another length
            rows.append(row)
        return rows


class Reader:
    """A language model that gets some tokens at a time, in constant memory.

    Where training carried the state, the text is one stream. Otherwise, and with statistics kept
    per position, it is cut into windows of `steps` tokens as in training, and the tokens of the
    window are read again with each push. Windows that begin from zero state may `overlap`: then the
    second half of a full window is the context of the next.
    """

    def __init__(
        self, model: LanguageModel, steps: int = 1, carried: bool = True, overlap: bool = False
    ) -> None:
        has_slots = get(model.rnn.norm).keeps_statistics and model.rnn.time_steps is not None
        self.model, self.steps, self.carried = model, steps, carried
        self.stream = Stream(model) if carried and not has_slots else None
        self.kept = steps // 2 if overlap and not carried else 0
        self.window: list[int] = []
        self.state: State | None = None  # state at the start of the window

    @classmethod
    def of_run(cls, run: str | Path, overlap: bool = False) -> Self:
        """Read with the best model of a run, in windows as in its training."""
        directory = RunDirectory(Path(run))
        train = directory.config(LanguageConfig).train
        model = LanguageTask.load(directory, named_device("cpu"))
        return cls(model, train.steps, train.reading == "streams", overlap)

    @torch.no_grad()
    def push(self, ids: list[int]) -> Tensor:
        """Return logits (T, C) of the token after each of these T ≥ 1 tokens."""
        if self.stream is not None:
            return self.stream.push(torch.tensor(ids))
        parts = []
        while ids:
            free = self.steps - len(self.window)
            some, ids = ids[:free], ids[free:]
            self.window += some
            with eval_mode(self.model):
                logits, after = self.model(torch.tensor(self.window)[:, None], self.state)
            parts.append(logits[-len(some) :, 0])
            if len(self.window) == self.steps:
                self.state = after if self.carried else None
                self.window = self.window[self.steps - self.kept :]
        return torch.cat(parts)

    def nats(self, ids: list[int]) -> Tensor:
        """Return the cross entropy (N - 1,) of every token but the first."""
        parts = []
        for start in range(0, len(ids) - 1, CHUNK_ROWS):
            some = ids[start : start + CHUNK_ROWS + 1]
            logits = self.push(some[:-1])
            parts.append(F.cross_entropy(logits, torch.tensor(some[1:]), reduction="none"))
        return torch.cat(parts)

    def draw(
        self, start: list[int], count: int, generator: torch.Generator, temperature: float = 1.0
    ) -> list[int]:
        """Draw `count` ids that follow `start`, one at a time."""
        drawn: list[int] = []
        given = start
        for _ in range(count):
            last = self.push(given)[-1]
            # Relative to the largest, so that a small temperature does not overflow.
            scaled = (last - last.max()) / max(temperature, 1e-30)
            given = [int(torch.multinomial(scaled.softmax(0), 1, generator=generator))]
            drawn += given
        return drawn
