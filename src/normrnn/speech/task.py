"""Frame-wise speech recognition as a task for the loop."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from normrnn.engine.ranks import Ranks, current, nothing
from normrnn.engine.statistics import BEST_VALID
from normrnn.engine.task import Experiment, Loss, Poll, StatisticsKind, Tensors, Validation
from normrnn.errors import UsageError, UserError
from normrnn.files import resolved
from normrnn.nn.normaliser import TEST, requesting
from normrnn.runs.rows import Row, finite_rows
from normrnn.speech.batches import Piece, read_batch
from normrnn.speech.config import SpeechConfig
from normrnn.speech.corpus import SpeechCorpus, read_speech
from normrnn.speech.evaluation import (
    SpeechEvaluator,
    evaluate,
    training_batches,
    training_pieces,
)
from normrnn.speech.exported import exported_loss
from normrnn.speech.load import build_model, load
from normrnn.speech.model import AcousticModel
from normrnn.speech.tables import show

__all__ = ["SpeechTask", "evaluate", "exported_loss", "load", "open_data", "show"]


def open_data(config: SpeechConfig) -> Experiment:
    """The prepared directory of the config."""
    if not config.data:
        raise UsageError(
            f"{config.recipe} needs prepared speech: pass --data DIR, made by normrnn prepare"
            " librispeech or normrnn prepare kaldi"
        )
    corpus = read_speech(config.data)
    lengths = corpus.train.lengths
    pieces = training_pieces(config, lengths)
    kept = len({piece.utterance for piece in pieces})
    if not kept:
        raise UserError(
            f"no training utterance of {config.data} has at most {config.train.max_frames} frames"
        )
    if config.normalisation.keeps_statistics and min(config.train.batch, len(pieces)) < 2:
        raise UserError("statistics over one utterance are its own: train.batch must be at least 2")
    hours = sum(piece.length for piece in pieces) / 360_000
    source = f"{corpus.path}: {kept} utterances, {hours:.2f} h, {corpus.classes} states"
    if kept < len(lengths):
        share = 1 - kept / len(lengths)
        source += (
            f"; {len(lengths) - kept} of {len(lengths)} ({share:.1%}) left out:"
            f" over {config.train.max_frames} frames"
        )

    def build(device: torch.device) -> SpeechTask:
        return SpeechTask(config, corpus, device)

    where = str(resolved(corpus.path))
    return Experiment(where, corpus.sha256, corpus.labels_sha256, source, build)


class SpeechTask:
    """Ragged batches of utterances, cross entropy and errors of every frame's state."""

    shares_batches = True

    def __init__(self, config: SpeechConfig, corpus: SpeechCorpus, device: torch.device) -> None:
        self.config = config
        self.corpus = corpus
        self.device = device
        self.ranks = current()
        if self.ranks.size > 1 and config.model.count_padding:
            raise UsageError("model.count_padding is for one process: padding is a whole batch's")
        self.model = build_model(config, corpus.dim, corpus.classes)
        self.model.mean.copy_(corpus.mean)
        self.model.variance.copy_(corpus.variance)
        self.model.label_counts.copy_(corpus.label_counts)
        self.model.to(device)
        self.evaluator = SpeechEvaluator(config, corpus, device)
        self._epoch = -1
        self._batches: list[list[Piece]] = []

    @property
    def files(self) -> Mapping[str, bytes]:
        """None: features' mean and variance and the states' counts are in the model."""
        return {}

    def batches(self, epoch: int) -> list[list[Piece]]:
        """The batches of an epoch, in order."""
        if epoch != self._epoch:
            self._batches = training_batches(self.config, self.corpus.train.lengths, epoch)
            self._epoch = epoch
        return self._batches

    def updates(self, epoch: int) -> int:
        """Batches of this epoch."""
        return len(self.batches(epoch))

    def reset(self) -> None:
        """Every utterance starts from zero state anyway."""

    def loss(self, epoch: int, index: int) -> Loss:
        """Loss of a batch, all frames of all its utterances."""
        batch = self.batches(epoch)[index]
        frames = sum(piece.length for piece in batch)
        share = read_batch(self.corpus.train, batch, self.device, self._sharing(batch))
        with self._statistics(epoch):
            if share is None:
                nats = nothing(self.model)
                errors = nats.new_zeros((), dtype=torch.long)
            else:
                nats, errors = self.model.loss(*share)
        return Loss(nats, frames, len(batch), errors)

    def _statistics(self, epoch: int) -> AbstractContextManager[None]:
        """The batch's own, or from an epoch on those that there are."""
        if not 0 < self.config.model.freeze_after <= epoch:
            return nullcontext()
        return requesting(dict.fromkeys(self.model.rnn.normalisers(), TEST))

    def _sharing(self, batch: list[Piece]) -> Ranks:
        """Those that have a part of a batch. Where each normalises its own by time steps, one
        utterance is no part: it has no statistics in any step."""
        ranks, config = self.ranks, self.config
        if config.train.sync_statistics or config.normalisation.pools != "step":
            return ranks
        return replace(ranks, size=min(ranks.size, max(1, len(batch) // 2)))

    def validate(self, poll: Poll) -> Validation:
        """The development set and the fixed training utterances."""
        rows = list(self.evaluator.rows(self.model, {"running": {}}, poll, batch=False))
        return Validation(finite_rows(rows), rows[0]["loss"])

    def population(self, model: nn.Module, poll: Poll) -> Tensors:
        """Recalibrated statistics over training batches."""
        assert isinstance(model, AcousticModel)
        return self.evaluator.population(model, poll)

    def test(
        self, model: nn.Module, kinds: Mapping[StatisticsKind, Tensors], poll: Poll
    ) -> list[Row]:
        """The selected model on the development set: there is no third set."""
        assert isinstance(model, AcousticModel)
        rows = self.evaluator.rows(model, kinds, poll, fixed=False)
        return finite_rows({**row, "split": BEST_VALID} for row in rows)

    def state_dict(self) -> dict[str, Any]:
        """Nothing flows between batches."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to carry on."""
