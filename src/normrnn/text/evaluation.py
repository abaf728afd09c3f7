"""A language model scored on a text: under which statistics, in how many streams."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normrnn.config.measure import perplexity
from normrnn.engine.loss import nats_of_each
from normrnn.engine.ranks import Ranks
from normrnn.engine.ranks import evaluating as evaluating_ranks
from normrnn.engine.statistics import (
    evaluating,
    kinds_of_run,
    own_or_kept,
    population_statistics,
    recalibrated_elsewhere,
    using,
)
from normrnn.engine.task import EvaluationOptions, Poll, StatisticsKind, Tensors, never
from normrnn.errors import UserError
from normrnn.runs.names import METRICS
from normrnn.runs.rows import Row, epoch_averages, finite_rows, left_out, read_rows
from normrnn.runs.store import RunDirectory
from normrnn.text.config import LanguageConfig
from normrnn.text.corpus import Corpus, encode_texts, open_texts
from normrnn.text.load import load
from normrnn.text.model import LanguageModel, State
from normrnn.text.sequences import Sequences
from normrnn.text.streams import Streams, Window

Text = Streams | Sequences
LONG_WINDOW = 2000
"""Steps per window where the window's length does not matter: one stream is slow in short ones."""
NO_PERPLEXITY = (
    "batch statistics refused: they see the future of the window, so that what they give a"
    " language model is no perplexity; the same holds for its losses in training mode"
)


@dataclass(frozen=True)
class Score:
    """Cross entropy summed over every predicted token, and the authors' way to average it."""

    nats: float
    count: int
    batch_ppl: float
    """Arithmetic mean of the mini-batches' perplexities, remainder dropped: the authors' figure."""
    streams: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.count

    def row(self, split: str, statistics: StatisticsKind) -> Row:
        """As metrics.jsonl and evaluation.json have it."""
        return {
            "split": split,
            "statistics": statistics,
            "loss": self.loss,
            "count": self.count,
            "batch_ppl": self.batch_ppl,
            "streams": self.streams,
        }


@torch.no_grad()
def score(
    model: LanguageModel, text: Text, steps: int, poll: Poll, *, own_statistics: bool = False
) -> Score:
    """Every token but the first, predicted once; eval mode.

    The state of streams is carried on from zero, sequences start from zero each.
    """
    windows: list[tuple[float, int, bool]] = []
    state: State | None = None
    with evaluating(model):
        for window in text.windows(steps):
            poll()
            rows = window.inputs.shape[1]
            if not text.carried:
                state = None
            elif state is not None:
                # The tail's streams are the first ones.
                state = tuple(s[:, :rows].contiguous() for s in state)
            # One row has no statistics of its own.
            own, nats = own_statistics and window.streams > 1, 0.0
            if rows or own:  # without rows, only to meet the other ranks
                with own_or_kept(model, own):
                    loss, state = model.loss(window.inputs, window.targets, state)
                nats = loss.item()
            full = (len(window.targets), window.streams) == (steps, text.batch)
            windows.append((nats, window.tokens, full))
    totals = text.ranks.total([nats for nats, _, _ in windows])
    counts = [count for _, count, _ in windows]
    whole = [p / n for p, (_, n, full) in zip(totals, windows, strict=True) if full]
    partial = [p / n for p, n in zip(totals, counts, strict=True)]
    perplexities = [perplexity(loss) for loss in whole or partial]  # or: shorter than one window
    return Score(sum(totals), sum(counts), sum(perplexities) / len(perplexities), text.batch)


@torch.no_grad()
def token_nats(model: LanguageModel, text: Text, steps: int) -> Tensor:
    """Cross entropy (N - 1,) of every token but the first of a text read with batch 1."""
    state: State | None = None
    parts = []
    with evaluating(model):
        for window in text.windows(steps):
            rows, state = model.features(window.inputs, state if text.carried else None)
            decoder = model.decoder.weight, model.decoder.bias
            parts.append(nats_of_each(rows.flatten(0, 1), *decoder, window.targets.flatten()))
    return torch.cat(parts)


def population_of_windows(
    model: LanguageModel, train: Text, steps: int, windows: int, poll: Poll
) -> Tensors:
    """Recalibrated statistics over the first training windows; the model keeps its own."""
    state: State | None = None

    def step(_: nn.Module, window: Window) -> Tensor:
        nonlocal state
        poll()
        features, state = model.features(window.inputs, state if train.carried else None)
        return features

    some = (train.window(i, steps) for i in range(min(windows, train.count(steps))))
    return population_statistics(model, some, step)


def read_ids(
    config: LanguageConfig, ids: Tensor, batch: int, name: str = "text", ranks: Ranks | None = None
) -> Text:
    """Ids (N,) as the config reads them, or a rank's share of each batch."""
    kind = Sequences if config.train.reading == "sequences" else Streams
    ranks = evaluating_ranks(config.normalisation) if ranks is None else ranks
    return kind(ids, batch, name, ranks)


class Evaluator:
    """The evaluations of one corpus under one config, for the loop and `normrnn evaluate`."""

    def __init__(self, config: LanguageConfig, corpus: Corpus, device: torch.device) -> None:
        self.config = config
        self.steps = config.train.steps
        self.train = read_ids(config, corpus.train, config.train.batch, "training text").to(device)
        limit = config.evaluation.tokens + 1 if config.evaluation.tokens else None
        self.texts = {"valid": corpus.valid[:limit], "test": corpus.test[:limit]}
        tokens = config.evaluation.train_tokens
        if tokens:
            self.texts["train_eval"] = corpus.train[: tokens + 1]
        self.device = device
        self._texts: dict[tuple[str, int], Text] = {}
        for split in self.texts:
            self.text(split)  # a text too short to score is found now, not after an epoch

    def text(self, split: str, batch: int | None = None) -> Text:
        """The text with the training batch's number of rows, fewer if it is very short."""
        text = self.texts[split]
        batch = min(batch or self.config.train.batch, max(1, len(text) - 1))
        if (split, batch) not in self._texts:
            name = {"valid": "validation text", "test": "test text"}.get(split, "training text")
            self._texts[split, batch] = read_ids(self.config, text, batch, name).to(self.device)
        return self._texts[split, batch]

    def score(self, model: LanguageModel, split: str, poll: Poll) -> Score:
        """With the statistics the model has at the moment."""
        return score(model, self.text(split), self.steps, poll)

    def batch_score(self, model: LanguageModel, split: str, poll: Poll) -> Score:
        """With each window's own statistics."""
        return score(model, self.text(split), self.steps, poll, own_statistics=True)

    def population(self, model: LanguageModel, poll: Poll) -> Tensors:
        """Recalibrated statistics; none for a network without normalisers."""
        if not self.config.normalisation.keeps_statistics:
            return {}
        windows = self.config.evaluation.recalibrate_windows
        return population_of_windows(model, self.train, self.steps, windows, poll)

    def rows(
        self,
        model: LanguageModel,
        split: str,
        kinds: Mapping[StatisticsKind, Tensors],
        poll: Poll,
    ) -> Iterator[Row]:
        """One row per kind of statistics, batch statistics last where they mean something."""
        for kind, statistics in kinds.items():
            with using(model, statistics):
                yield self.score(model, split, poll).row(split, kind)
        norm = self.config.normalisation
        # Statistics that see the window's future would give no perplexity.
        if norm.keeps_statistics and not norm.looks_ahead and self.text(split).batch > 1:
            yield self.batch_score(model, split, poll).row(split, "batch")


def evaluate(run: RunDirectory, options: EvaluationOptions) -> dict[str, Any]:
    """Validation, test and the beginning of the training text under all statistics."""
    model, config = load(run, options.device), run.config(LanguageConfig)
    assert model.vocabulary is not None
    texts = open_texts(options.data or config.data)
    same = texts.sha256 == config.data_sha256
    corpus = encode_texts(texts, model.vocabulary, config.text if same else None)
    evaluator = Evaluator(config, corpus, options.device)
    kinds = kinds_of_run(run, lambda: evaluator.population(model, never))
    rows = [row for s in ("valid", "test") for row in evaluator.rows(model, s, kinds, never)]
    if "train_eval" in evaluator.texts:
        fixed = evaluator.score(model, "train_eval", never)
        rows.append(fixed.row("train_eval", next(iter(kinds))))
    # Sequences from zero state are the same however many are read at once.
    if options.one_stream and config.train.reading == "streams":
        rows += _one_stream(model, evaluator, kinds)
    rows = [config.own_measure.row(row) for row in rows]
    finite = finite_rows(rows)
    if not finite:
        raise UserError(f"the model of {run.path} gives no finite loss on {texts.source}")
    notes = [NO_PERPLEXITY] if config.normalisation.looks_ahead else []
    notes += left_out(rows) + recalibrated_elsewhere(same, kinds, texts.source)
    return {
        "data_sha256": texts.sha256,
        "same_data": same,
        "rows": finite,
        "train_epochs": epoch_averages(read_rows(run.path / METRICS)),
        "authors_protocol": _authors(config, finite),
        "notes": notes,
    }


def window_for_one_stream(config: LanguageConfig) -> int:
    """Long windows, except where statistics belong to positions in the training window."""
    fixed = config.model.time_steps or config.train.reading == "sequences"
    return config.train.steps if fixed else LONG_WINDOW


def _authors(config: LanguageConfig, rows: list[Row]) -> list[Row]:
    """The authors' own figure: batch statistics, mean of the mini-batches' perplexities."""
    if config.text.level == "char":
        return []  # their code that we know of is the one for words
    wanted = "batch" if config.normalisation.keeps_statistics else "running"
    return [
        {k: row[k] for k in ("split", "statistics", "batch_ppl", "streams")}
        for row in rows
        if row["statistics"] == wanted and row["split"] in ("valid", "test") and "batch_ppl" in row
    ]


def _one_stream(
    model: LanguageModel, evaluator: Evaluator, kinds: Mapping[StatisticsKind, Tensors]
) -> list[Row]:
    text, steps = evaluator.text("test", 1), window_for_one_stream(evaluator.config)
    rows = []
    for kind, statistics in kinds.items():
        with using(model, statistics):
            row = score(model, text, steps, never).row("test", kind)
        # A mean over these long windows is nobody's protocol.
        del row["batch_ppl"]
        rows.append(row)
    return rows
