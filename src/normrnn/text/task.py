"""Language modelling: the next token, in windows of contiguous streams or of fixed sequences."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from normrnn.engine.ranks import Ranks
from normrnn.engine.statistics import StatisticsKind, Tensors, using
from normrnn.engine.task import Batch, Split, Task
from normrnn.errors import UserError
from normrnn.runs.rows import Row
from normrnn.text.config import LanguageConfig
from normrnn.text.corpus import Corpus, read_corpus
from normrnn.text.model import LanguageModel
from normrnn.text.vocabulary import Vocabulary
from normrnn.text.windows import Sequences, Streams, Window

VOCABULARY = "vocabulary"
"""Entry in the header of model.safetensors."""
LONG_WINDOW = 2000
"""Steps per window where its length does not matter: one stream is slow in short ones."""
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

    def __init__(self, config: LanguageConfig, corpus: Corpus | None = None) -> None:
        corpus = corpus or read_corpus(config.data, config.text)
        super().__init__(config, corpus.sha256, corpus.where, corpus.source)
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
            embedding=m.embedding or None,
            **m.options(config.normalisation),
            time_steps=m.time_steps or None,
            init=m.init if m.initialiser == "uniform" else m.initialiser,
        )
        model.vocabulary = vocabulary
        return model

    @classmethod
    def saved_sizes(cls, weights: Tensors, metadata: Mapping[str, str]) -> dict[str, Any]:
        """Return the vocabulary of a saved network."""
        vocabulary = Vocabulary.from_json(metadata.get(VOCABULARY, ""))
        size = len(weights.get("embedding.weight", ()))
        if size != len(vocabulary):
            raise UserError(
                f"the vocabulary has {len(vocabulary)} symbols, the network {size}: they do not"
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
                score = self.score(model, "test", keys=one)
            row = self.row(score, "test", kind, streams=1)
            del row["batch_ppl"]  # a mean over windows of another length
            rows.append(row)
        return rows


def one_stream_steps(config: LanguageConfig) -> int:
    """Return the window of a single stream: long, except where statistics belong to positions in
    the training window."""
    is_fixed = config.model.time_steps or config.train.reading == "sequences"
    return config.train.steps if is_fixed else LONG_WINDOW
