"""Language modelling as a task for the loop."""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from normrnn.engine.task import Experiment, Loss, Poll, Row, Tensors, Validation
from normrnn.errors import UserError
from normrnn.files import expanded
from normrnn.runs.environment import built
from normrnn.runs.store import MODEL, VOCABULARY
from normrnn.text.config import LanguageConfig
from normrnn.text.corpus import Corpus, build_corpus
from normrnn.text.evaluation import (
    Score,
    Statistics,
    Text,
    population_statistics,
    score,
    set_statistics,
    statistics_of,
    using,
)
from normrnn.text.files import BUILTIN, read_texts
from normrnn.text.model import LanguageModel, State
from normrnn.text.sequences import Sequences
from normrnn.text.streams import Streams

RUNNING = "running_statistics.safetensors"
"""Beside the best model, when that one holds recalibrated statistics."""


def build_model(config: LanguageConfig, vocab_size: int) -> LanguageModel:
    """The network the config describes, freshly initialised."""
    m = config.model
    make = partial(
        LanguageModel,
        vocab_size,
        m.hidden,
        m.layers,
        cell=m.cell,
        embedding=m.embedding or None,
        dropout=m.dropout,
        norm=config.norm if config.normalisation.normalises else None,
        peephole=None if m.peephole == "none" else m.peephole,
        gamma=m.gamma,
        eps=m.eps,
        momentum=m.momentum,
        time_steps=m.time_steps or None,
        init=m.init if m.initialiser == "uniform" else m.initialiser,
    )
    return built(make)


def deciding_statistics(config: LanguageConfig) -> Statistics:
    """The statistics that decide which model is best, and that it is saved with.

    Under dropout p the variance of W_x x is 1/(1−p) times that without: running statistics are
    biased then, and population statistics without dropout take their place.
    """
    biased = config.normalisation.keeps_statistics and config.model.dropout > 0
    return "recalibrated" if biased else "running"


def read_ids(config: LanguageConfig, ids: torch.Tensor, batch: int, name: str = "text") -> Text:
    """Ids (N,) as the config reads them."""
    return (Sequences if config.train.reading == "sequences" else Streams)(ids, batch, name)


def open_language(config: LanguageConfig) -> Experiment:
    """The texts of the config."""
    texts = read_texts(config.data)
    where = config.data if config.data == BUILTIN else str(expanded(config.data).resolve())

    def build(device: torch.device) -> LanguageTask:
        return LanguageTask(config, build_corpus(texts, config.text), device)

    return Experiment(where, texts.sha256, texts.sha256, texts.source, build)


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
        return population_statistics(model, self.train, self.steps, windows, poll)

    def rows(
        self, model: LanguageModel, split: str, population: Tensors, poll: Poll
    ) -> Iterator[Row]:
        """One row per kind of statistics that says something about this network."""
        yield self.score(model, split, poll).row(split, "running")
        if not self.config.normalisation.keeps_statistics:
            return
        with using(model, population):
            yield self.score(model, split, poll).row(split, "recalibrated")
        # Where the window's own statistics see its future, that would be no perplexity.
        if not self.config.normalisation.looks_ahead and self.text(split).batch > 1:
            yield self.batch_score(model, split, poll).row(split, "batch")


class LanguageTask:
    """Cross entropy of the next token, over windows of contiguous streams or fixed sequences."""

    def __init__(self, config: LanguageConfig, corpus: Corpus, device: torch.device) -> None:
        self.config = config
        self.vocabulary = corpus.vocabulary
        self.model = build_model(config, len(corpus.vocabulary)).to(device)
        self.evaluator = Evaluator(config, corpus, device)
        self.state: State | None = None
        self.unit = "characters" if config.text.level == "char" else "tokens"
        self.updates(0)  # a text too short for a batch is found now

    @property
    def files(self) -> Mapping[str, bytes]:
        """The vocabulary."""
        return {VOCABULARY: self.vocabulary.to_json().encode()}

    def updates(self, epoch: int) -> int:  # noqa: ARG002  every epoch is the same text
        """Windows of the training text, or as many as `epoch_tokens` make."""
        config = self.config.train
        windows = self.evaluator.train.count(config.steps)
        limit = config.epoch_tokens // (config.batch * config.steps)
        return min(windows, max(1, limit)) if config.epoch_tokens else windows

    def reset(self) -> None:
        """Zero state."""
        self.state = None

    def loss(self, epoch: int, index: int) -> Loss:
        """Loss of window `index`; the state of streams flows on, its gradient does not."""
        text, steps = self.evaluator.train, self.config.train.steps
        if isinstance(text, Sequences):
            window = text.shuffled(self.config.seed, epoch, index, steps)
            nats, _ = self.model.loss(window.inputs, window.targets)
        else:
            window = text.window(index, steps)
            nats, state = self.model.loss(window.inputs, window.targets, self.state)
            self.state = tuple(s.detach() for s in state)
        return Loss(nats, window.targets.numel(), window.targets.shape[1])

    def validate(self, poll: Poll) -> Validation:
        """Validation with all statistics, and the fixed training tokens with the deciding ones."""
        deciding = deciding_statistics(self.config)
        population = self.evaluator.population(self.model, poll)
        rows = list(self.evaluator.rows(self.model, "valid", population, poll))
        decided = next(row["loss"] for row in rows if row["statistics"] == deciding)
        rows = finite_rows(rows)
        chosen = population if deciding == "recalibrated" else {}
        with using(self.model, chosen):
            if "train_eval" in self.evaluator.texts:
                fixed = self.evaluator.score(self.model, "train_eval", poll)
                rows.append(fixed.row("train_eval", deciding))
            weights = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        files = {MODEL: weights}
        if chosen:
            files[RUNNING] = statistics_of(self.model)
        return Validation(rows, decided, files)

    def test(self, files: Mapping[str, Tensors], poll: Poll) -> list[Row]:
        """The best model on the test text; the model in training is left alone."""
        best = copy.deepcopy(self.model)
        try:
            best.load_state_dict(files[MODEL])
        except RuntimeError:
            raise UserError(f"the {MODEL} beside the checkpoint is another network's") from None
        set_statistics(best, files.get(RUNNING, {}))
        population = self.evaluator.population(best, poll)
        return finite_rows(self.evaluator.rows(best, "test", population, poll))

    def state_dict(self) -> dict[str, Any]:
        """The carried state."""
        return {"state": self.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry on from that state."""
        kept = state["state"]
        if kept is not None:
            m = self.config.model
            shape, parts = (m.layers, self.config.train.batch, m.hidden), 1 + (m.cell == "lstm")
            if [s.shape for s in kept] != [shape] * parts:
                raise ValueError("its state has another size")
            kept = tuple(s.to(self.evaluator.device) for s in kept)
        self.state = kept


def finite_rows(rows: Iterable[Row]) -> list[Row]:
    """One kind of statistics may diverge before the others: JSON has no number for that."""
    return [row for row in rows if math.isfinite(row["loss"])]
