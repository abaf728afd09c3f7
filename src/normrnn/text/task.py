"""Language modelling: the next token, in windows of contiguous streams or of fixed sequences."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normrnn.config.measure import perplexity
from normrnn.engine.loss import nats_of_each
from normrnn.engine.ranks import Ranks
from normrnn.engine.statistics import StatisticsKind, Tensors, evaluating, using
from normrnn.engine.task import Batch, Loss, Split, State, Task, never
from normrnn.errors import UserError
from normrnn.runs.names import METRICS, VOCABULARY
from normrnn.runs.rows import Row, epoch_averages, read_rows
from normrnn.runs.store import RunDirectory
from normrnn.text.config import LanguageConfig
from normrnn.text.corpus import Corpus, read_corpus
from normrnn.text.model import LanguageModel
from normrnn.text.vocabulary import Vocabulary
from normrnn.text.windows import Sequences, Streams, Window

LONG_WINDOW = 2000
"""Steps per window where its length does not matter: one stream is slow in short ones."""
NO_PERPLEXITY = (
    "batch statistics left out: they see the future of the window, so that the loss of a language"
    " model with them is not a perplexity; neither is its loss in training mode"
)
_NAMES = {"valid": "validation text", "test": "test text"}


def windows(config: LanguageConfig, tokens: int, batch: int, name: str = "text") -> Any:
    """Return the windows of a text as the config reads them: Streams or Sequences."""
    kind = Sequences if config.train.reading == "sequences" else Streams
    return kind(tokens, batch, config.train.steps, name)


class LanguageTask(Task):
    """Cross entropy of the next token."""

    config: LanguageConfig
    model: LanguageModel
    splits = ("valid", "test")
    validates_all_statistics = True
    columns = ("streams",)
    file_names = (VOCABULARY,)

    def __init__(self, config: LanguageConfig, corpus: Corpus | None = None) -> None:
        corpus = corpus or read_corpus(config.data, config.text)
        super().__init__(config, corpus.sha256, corpus.where, corpus.source)
        evaluation = config.evaluation
        self.vocabulary = corpus.vocabulary
        self.sizes = {"vocabulary": corpus.vocabulary}
        self.files = {VOCABULARY: corpus.vocabulary.to_json().encode()}
        self.corpus = corpus
        self.carries_state = config.train.reading == "streams"
        self.calibration_batches = evaluation.recalibrate_windows
        self.has_train_eval = evaluation.train_tokens > 0
        limit = evaluation.tokens + 1 if evaluation.tokens else None
        self.texts = {
            "train": corpus.train,
            "valid": corpus.valid[:limit],
            "test": corpus.test[:limit],
            "train_eval": corpus.train[: evaluation.train_tokens + 1],
        }
        # A text that is too short is found before anything is trained.
        self._windows = {
            split: windows(
                config, len(ids), self.rows_at_once(split), _NAMES.get(split, "training text")
            )
            for split, ids in self.texts.items()
            if split != "train_eval" or self.has_train_eval
        }
        if not self._windows["train"].common:
            raise UserError(
                f"the training text has {self._windows['train'].whole} sequences of"
                f" {config.train.steps} tokens; a batch needs {config.train.batch}"
            )
        self._check_rows()

    @property
    def data_summary(self) -> str:  # type: ignore[override]
        """Sizes of the texts."""
        return self.corpus.summary

    def _check_rows(self) -> None:
        """Raise UserError where the last training window has too few rows for the norm."""
        m, train = self.config.model, self._windows["train"]
        if m.shrinkage or not self.config.normalisation.more_rows_than_features:
            return
        rows = train[train.common - 1].read(self.corpus.train, self.ranks)[0].numel()
        features = max(m.hidden, m.embedding)
        if rows <= features:
            raise UserError(
                f"norm {self.config.norm} needs more tokens in every update than its {features}"
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
            m.hidden,
            m.layers,
            embedding=m.embedding or None,
            **m.options(config.normalisation),
            time_steps=m.time_steps or None,
            init=m.init if m.initialiser == "uniform" else m.initialiser,
        )
        model.vocabulary = vocabulary
        return model

    @classmethod
    def saved_sizes(cls, weights: Tensors, files: Mapping[str, bytes]) -> dict[str, Any]:
        """Return the vocabulary of a saved network."""
        vocabulary = Vocabulary.from_json(files[VOCABULARY])
        size = len(weights.get("embedding.weight", ()))
        if size != len(vocabulary):
            raise UserError(
                f"{VOCABULARY} has {len(vocabulary)} symbols, the network {size}: they do not"
                " belong together"
            )
        return {"vocabulary": vocabulary}

    def rows_at_once(self, split: Split) -> int:
        """Return the training batch's number of streams, fewer for a very short held-out text."""
        batch = self.config.train.batch
        return batch if split == "train" else min(batch, max(1, len(self.texts[split]) - 1))

    def batches(self, split: Split, epoch: int = 0) -> Sequence[Window]:
        """Return the windows of a text; of the training text those of an epoch."""
        every = self._windows[split]
        if split == "train" and isinstance(every, Sequences):
            return every.shuffled(self.config.seed * 1_000_003 + epoch)
        return every

    def updates(self, epoch: int) -> int:
        """Return the number of windows of an epoch, or as many as `epoch_tokens` make."""
        super().updates(epoch)
        train = self.config.train
        limit = train.epoch_tokens // (train.batch * train.steps)
        common = self._windows["train"].common
        return min(common, max(1, limit)) if train.epoch_tokens else common

    def batch(self, split: Split, key: Window, ranks: Ranks) -> Batch:
        """Read this rank's streams of a window."""
        inputs, targets = (x.to(self.device) for x in key.read(self.texts[split], ranks))
        streams = len(key.starts)
        is_full = (key.length, streams) == (self.config.train.steps, self.rows_at_once(split))
        inputs = inputs if inputs.numel() else None
        return Batch(inputs, targets, key.length * streams, streams, is_full)

    def row_fields(self, split: Split) -> Row:
        """Return the number of streams."""
        return {"streams": self.rows_at_once(split)}

    def calibration(self) -> Iterable[Window]:
        """Return training windows in the order of the text."""
        train = self._windows["train"]
        return (train[i] for i in range(train.common))

    def extra_rows(self, model: Any, kinds: Mapping[StatisticsKind, Tensors]) -> list[Row]:
        """Read the test text as one stream; sequences from zero state are the same anyway."""
        if not self.carries_state:
            return []
        ids = self.texts["test"]
        one = Streams(len(ids), 1, one_stream_steps(self.config))
        rows = []
        for kind, statistics in kinds.items():
            with using(model, statistics):
                score = self.score_batches(model, "test", one, never, False)
            row = self.row(score, "test", kind, streams=1)
            del row["batch_ppl"]  # a mean over windows of this length is nobody's figure
            rows.append(row)
        return rows

    def extra_results(self, run: RunDirectory, rows: list[Row]) -> dict[str, Any]:
        """Return averages of the training epochs, and the authors' figure: batch statistics, mean
        of the mini-batches' perplexities."""
        norm = self.config.normalisation
        epochs = epoch_averages(read_rows(run.path / METRICS))
        wanted = "batch" if norm.keeps_statistics else "running"
        authors = [
            {k: row[k] for k in ("split", "statistics", "batch_ppl", "streams")}
            for row in rows
            if row["statistics"] == wanted
            and row["split"] in self.splits
            and "batch_ppl" in row
            and self.config.text.level == "word"
        ]
        notes = [NO_PERPLEXITY] if norm.looks_ahead else []
        return {"train_epochs": epochs, "authors_protocol": authors, "notes": notes}

    @classmethod
    def summary(cls, result: Mapping[str, Any]) -> list[str]:
        """Return the best training average and the authors' figures in words."""
        lines = []
        if result["train_epochs"]:
            best = min(result["train_epochs"], key=lambda row: row["loss"])
            lines.append(
                f"train, running average of epoch {best['epoch']}: perplexity"
                f" {perplexity(best['loss']):,.2f}, mean of the mini-batches'"
                f" {best['batch_ppl']:,.2f}"
            )
        for row in result["authors_protocol"]:
            lines.append(
                f"authors' protocol, {row['split']}: {row['batch_ppl']:,.2f} ({row['statistics']}"
                " statistics, mean of the mini-batches' perplexities)"
            )
        return lines

    def exported(self, session: Any) -> nn.Module:
        """Return a network that runs an ONNX session."""
        return _Exported(session)


class _Exported(nn.Module):
    def __init__(self, session: Any) -> None:
        super().__init__()
        self.session = session
        self.sizes = {put.name: put.shape for put in session.get_inputs() if put.name != "tokens"}

    def loss(self, inputs: Tensor, targets: Tensor, state: State | None = None) -> Loss:
        if state is None:
            B = inputs.shape[1]
            state = tuple(torch.zeros(layers, B, H) for layers, _, H in self.sizes.values())
        values = {name: s.numpy() for name, s in zip(self.sizes, state, strict=True)}
        outputs = self.session.run(None, {"tokens": inputs.numpy().astype(np.int64), **values})
        logits, *after = map(torch.from_numpy, outputs)
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return Loss(nats, state=tuple(after))


def one_stream_steps(config: LanguageConfig) -> int:
    """Return the window of a single stream: long, except where statistics belong to positions in
    the training window."""
    is_fixed = config.model.time_steps or config.train.reading == "sequences"
    return config.train.steps if is_fixed else LONG_WINDOW


@torch.no_grad()
def token_nats(model: LanguageModel, config: LanguageConfig, ids: Tensor) -> Tensor:
    """Return the cross entropy (N - 1,) of every token of a text but the first, read as one stream,
    or as sequences from zero state if the config says so."""
    carried = config.train.reading == "streams"
    kind = Streams if carried else Sequences
    state: State | None = None
    parts = []
    with evaluating(model):
        for window in kind(len(ids), 1, one_stream_steps(config)):
            inputs, targets = window.read(ids)
            rows, state = model.features(inputs, state if carried else None)
            head = model.decoder.weight, model.decoder.bias
            parts.append(nats_of_each(rows, *head, targets.flatten()))
    return torch.cat(parts)
