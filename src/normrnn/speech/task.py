"""Frame-wise speech recognition as a task for the loop."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normrnn import batch_statistics, recalibrate
from normrnn.engine.task import Experiment, Loss, Poll, Row, Tensors, Validation
from normrnn.errors import UsageError, UserError
from normrnn.runs.environment import built
from normrnn.runs.store import MODEL
from normrnn.speech.batches import Piece, cut, read_batch, shuffled_batches, sorted_batches
from normrnn.speech.config import SpeechConfig
from normrnn.speech.corpus import SpeechCorpus, SpeechSplit, read_speech
from normrnn.speech.model import AcousticModel
from normrnn.text.evaluation import Statistics, set_statistics, statistics_of, using


def build_model(config: SpeechConfig, dim: int, classes: int) -> AcousticModel:
    """The network the config describes, freshly initialised."""
    m = config.model
    make = partial(
        AcousticModel,
        dim,
        classes,
        m.hidden,
        m.layers,
        bidirectional=m.bidirectional,
        norm=config.norm if config.normalisation.normalises else None,
        peephole=None if m.peephole == "none" else m.peephole,
        gamma=m.gamma,
        eps=m.eps,
        momentum=m.momentum,
    )
    return built(make)


def training_pieces(config: SpeechConfig, lengths: Sequence[int]) -> list[Piece]:
    """What is trained on: utterances within the length limit, cut if the config says so."""
    limit = config.train.max_frames
    pieces = cut(lengths, config.train.piece_frames)
    return [p for p in pieces if not limit or lengths[p.utterance] <= limit]


def open_speech(config: SpeechConfig) -> Experiment:
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

    where = str(corpus.path.resolve())
    return Experiment(where, corpus.sha256, corpus.labels_sha256, source, build)


@dataclass(frozen=True)
class FrameScore:
    """Cross entropy and errors pooled over every frame."""

    nats: float
    errors: int
    count: int

    def row(self, split: str, statistics: Statistics) -> Row:
        """As metrics.jsonl and evaluation.json have it: FCE is `loss`."""
        return {
            "split": split,
            "statistics": statistics,
            "loss": self.nats / self.count,
            "fer": self.errors / self.count,
            "count": self.count,
        }


class SpeechEvaluator:
    """The evaluations of one corpus under one config, for the loop and `normrnn evaluate`."""

    def __init__(self, config: SpeechConfig, corpus: SpeechCorpus, device: torch.device) -> None:
        self.config = config
        self.corpus = corpus
        self.device = device
        limit, lengths = config.train.max_frames, corpus.train.lengths
        whole = [piece for piece in cut(lengths) if not limit or piece.length <= limit]
        n = len(whole)
        some = min(config.evaluation.train_utterances, n)
        self.fixed = [whole[i * n // some] for i in range(some)]
        # One utterance has no statistics of its own in any time step.
        self.alone = config.normalisation.pools != "step"

    @torch.no_grad()
    def score(
        self,
        model: AcousticModel,
        split: SpeechSplit,
        pieces: Sequence[Piece],
        poll: Poll,
        *,
        own_statistics: bool = False,
    ) -> FrameScore:
        """Whole utterances in eval mode, with the model's statistics or each batch's own."""
        was_training = model.training
        model.eval()
        nats, errors, count = 0.0, 0, 0
        for batch in sorted_batches(pieces, self.config.train.batch, alone=self.alone):
            poll()
            utterances, targets = read_batch(split, batch, self.device)
            with batch_statistics(model) if own_statistics else contextlib.nullcontext():
                loss, wrong = model.loss(utterances, targets)
            nats += loss.item()
            errors += int(wrong)
            count += len(targets)
        model.train(was_training)
        return FrameScore(nats, errors, count)

    def dev(self, model: AcousticModel, poll: Poll, *, own_statistics: bool = False) -> FrameScore:
        """All of the development set."""
        dev = self.corpus.dev
        return self.score(model, dev, cut(dev.lengths), poll, own_statistics=own_statistics)

    def population(self, model: AcousticModel, poll: Poll) -> Tensors:
        """Recalibrated statistics over training batches; none for a network without normalisers."""
        if not self.config.normalisation.keeps_statistics:
            return {}
        train = self.config.train
        pieces = training_pieces(self.config, self.corpus.train.lengths)
        batches = shuffled_batches(
            pieces, train.batch, train.pool, self.config.seed, 0, alone=self.alone
        )

        def step(_: nn.Module, batch: Sequence[Piece]) -> Tensor:
            poll()
            return model.features(read_batch(self.corpus.train, batch, self.device)[0])

        before = statistics_of(model)
        try:
            with torch.no_grad():
                recalibrate(model, batches[: self.config.evaluation.recalibrate_batches], step=step)
            return statistics_of(model)
        finally:
            set_statistics(model, before)

    def rows(self, model: AcousticModel, poll: Poll) -> Iterator[Row]:
        """Under all statistics that say something about this network."""
        if (self.corpus.dim, self.corpus.classes) != (len(model.mean), len(model.label_counts)):
            raise UserError(
                f"{self.corpus.path} has {self.corpus.dim} features and {self.corpus.classes}"
                f" states; the network has {len(model.mean)} and {len(model.label_counts)}"
            )
        yield self.dev(model, poll).row("valid", "running")
        if self.fixed:
            fixed = self.score(model, self.corpus.train, self.fixed, poll)
            yield fixed.row("train_eval", "running")
        if not self.config.normalisation.keeps_statistics:
            return
        with using(model, self.population(model, poll)):
            yield self.dev(model, poll).row("valid", "recalibrated")
        if self.alone or len(self.corpus.dev.lengths) > 1:
            yield self.dev(model, poll, own_statistics=True).row("valid", "batch")


class SpeechTask:
    """Ragged batches of utterances, cross entropy and errors of every frame's state."""

    unit = "frames"

    def __init__(self, config: SpeechConfig, corpus: SpeechCorpus, device: torch.device) -> None:
        self.config = config
        self.corpus = corpus
        self.device = device
        self.model = build_model(config, corpus.dim, corpus.classes)
        self.model.mean.copy_(corpus.mean)
        self.model.variance.copy_(corpus.variance)
        self.model.label_counts.copy_(corpus.label_counts)
        self.model.to(device)
        self.evaluator = SpeechEvaluator(config, corpus, device)
        self.pieces = training_pieces(config, corpus.train.lengths)
        self._epoch = -1
        self._batches: list[list[Piece]] = []

    @property
    def files(self) -> Mapping[str, bytes]:
        """None: features' mean and variance and the states' counts are in the model."""
        return {}

    def batches(self, epoch: int) -> list[list[Piece]]:
        """The batches of an epoch, in order."""
        if epoch != self._epoch:
            train = self.config.train
            self._batches = shuffled_batches(
                self.pieces,
                train.batch,
                train.pool,
                self.config.seed,
                epoch,
                alone=self.evaluator.alone,
            )
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
        utterances, targets = read_batch(self.corpus.train, batch, self.device)
        nats, errors = self.model.loss(utterances, targets)
        return Loss(nats, len(targets), len(batch), int(errors))

    def validate(self, poll: Poll) -> Validation:
        """The development set and the fixed training utterances."""
        dev = self.evaluator.dev(self.model, poll)
        rows = [dev.row("valid", "running")]
        if self.evaluator.fixed:
            fixed = self.evaluator.score(self.model, self.corpus.train, self.evaluator.fixed, poll)
            rows.append(fixed.row("train_eval", "running"))
        weights = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        return Validation(rows, dev.nats / dev.count, {MODEL: weights})

    def test(self, files: Mapping[str, Tensors], poll: Poll) -> list[Row]:  # noqa: ARG002
        """There is no third set."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Nothing flows between batches."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to carry on."""
