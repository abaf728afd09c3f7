"""Language modelling: the next token, in windows of contiguous streams or of fixed sequences."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from normrnn.engine.loss import Sums
from normrnn.engine.ranks import ALONE, Ranks
from normrnn.engine.task import Batch, Split, StatisticsKind, Task, Tensors, using
from normrnn.errors import UserError
from normrnn.runs.records import Row
from normrnn.text.config import LanguageConfig
from normrnn.text.corpus import Corpus, read_corpus
from normrnn.text.model import LanguageModel
from normrnn.text.vocabulary import Vocabulary
from normrnn.text.windows import Window, sequences, streams

VOCABULARY = "vocabulary"
"""Entry in the header of model.safetensors."""
LONG_WINDOW = 2000
"""Steps per window where its length does not matter: one stream is slow in short ones."""


class LanguageTask(Task):
    """Cross entropy of the next token."""

    config: LanguageConfig
    model: LanguageModel
    splits = ("valid", "test")
    validates_all_statistics = True

    def __init__(self, config: LanguageConfig, corpus: Corpus | None = None) -> None:
        corpus = corpus or read_corpus(config.data, config.text)
        source = f"{corpus.source}; {corpus.summary}"
        super().__init__(config, corpus.sha256, corpus.where, source)
        evaluation = config.evaluation
        self.vocabulary = corpus.vocabulary
        self.sizes = {"vocabulary": corpus.vocabulary}
        self.metadata = {VOCABULARY: corpus.vocabulary.to_json()}
        self.corpus = corpus
        self.carries_state = config.train.reading == "streams"
        self.calibration_batches = evaluation.recalibrate_windows
        self.has_train_eval = evaluation.train_tokens > 0
        limit = evaluation.tokens + 1 if evaluation.tokens else None
        self.texts = {
            "train": corpus.train,
            "valid": corpus.valid[:limit],
            "test": corpus.test[:limit],
        }
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
        """Return the windows of a text; sequences in an order that a seed determines."""
        sizes = len(self.texts[split]), self.rows_at_once(split), self.config.train.steps
        if self.carries_state:
            return streams(*sizes, training=split == "train")
        return sequences(*sizes, training=split == "train", seed=seed)

    def batches(self, split: Split, epoch: int = 0) -> Sequence[Window]:
        """Return the windows of a text; of the training text those of an epoch."""
        if split != "train":
            return self._windows[split]
        train = self.config.train
        every = self._windows["train"]
        if not self.carries_state:
            every = self.windows("train", self.config.seed * 1_000_003 + epoch)
        tokens = train.epoch_tokens
        return every[: max(1, tokens // (train.batch * train.steps))] if tokens else every

    def batch(self, split: Split, key: Window, ranks: Ranks = ALONE) -> Batch:
        """Read a rank's streams of a window."""
        inputs, targets = (x.to(self.device) for x in key.read(self.texts[split], ranks))
        is_full = (key.length, len(key)) == (self.config.train.steps, self.rows_at_once(split))
        inputs = inputs if inputs.numel() else None
        return Batch(inputs, targets, key.length * len(key), len(key), is_full)

    def row(self, sums: Sums, split: Split, statistics: StatisticsKind, **fields: Any) -> Row:
        """Return a row with the number of streams."""
        fields = {"streams": self.rows_at_once(split), **fields}
        return super().row(sums, split, statistics, **fields)

    def calibration(self) -> Iterable[Window]:
        """Return training windows in the order of the text."""
        return self._windows["train"]

    def extra_rows(self, model: Any, kinds: Mapping[StatisticsKind, Tensors]) -> list[Row]:
        """Read the test text as one stream; sequences from zero state are the same anyway."""
        if not self.carries_state:
            return []
        # Statistics per position belong to those in the training window.
        steps = self.config.train.steps if self.config.model.time_steps else LONG_WINDOW
        one = streams(len(self.texts["test"]), 1, steps)
        rows = []
        for kind, statistics in kinds.items():
            with using(model, statistics):
                score = self.score(model, "test", keys=one)
            row = self.row(score, "test", kind, streams=1)
            del row["batch_ppl"]  # a mean over windows of another length
            rows.append(row)
        return rows
