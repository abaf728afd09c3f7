"""An acoustic model scored on utterances: under which statistics."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normrnn.engine.ranks import evaluating as evaluating_ranks
from normrnn.engine.ranks import nothing
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
from normrnn.runs.rows import Row, finite_rows, left_out
from normrnn.runs.store import RunDirectory
from normrnn.speech.batches import Piece, cut, read_batch, shuffled_batches, sorted_batches
from normrnn.speech.config import SpeechConfig
from normrnn.speech.corpus import SpeechCorpus, SpeechSplit, read_speech
from normrnn.speech.load import load
from normrnn.speech.model import AcousticModel


def training_pieces(config: SpeechConfig, lengths: Sequence[int]) -> list[Piece]:
    """What is trained on: utterances within the length limit, cut if the config says so."""
    limit = config.train.max_frames
    pieces = cut(lengths, config.train.piece_frames)
    return [p for p in pieces if not limit or lengths[p.utterance] <= limit]


def training_batches(config: SpeechConfig, lengths: Sequence[int], epoch: int) -> list[list[Piece]]:
    """The batches of an epoch, in order."""
    train = config.train
    return shuffled_batches(
        training_pieces(config, lengths),
        train.batch,
        train.pool,
        seed=config.seed,
        epoch=epoch,
    )


@dataclass(frozen=True)
class FrameScore:
    """Cross entropy and errors pooled over every frame."""

    nats: float
    errors: int
    count: int

    def row(self, split: str, statistics: StatisticsKind) -> Row:
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
        self.ranks = evaluating_ranks(config.normalisation)
        limit, lengths = config.train.max_frames, corpus.train.lengths
        whole = [piece for piece in cut(lengths) if not limit or piece.length <= limit]
        n = len(whole)
        some = min(config.evaluation.train_utterances, n)
        self.fixed = [whole[i * n // some] for i in range(some)]

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
        nats, errors, ranks = 0.0, 0, self.ranks
        size = self.config.train.batch
        with evaluating(model):
            for batch in sorted_batches(pieces, size):
                poll()
                share = read_batch(split, batch, self.device, ranks)
                with own_or_kept(model, own_statistics):
                    if share is None:
                        nothing(model)
                        continue
                    loss, wrong = model.loss(*share)
                nats += loss.item()
                errors += int(wrong)
        nats, wrong = ranks.total([nats, errors])
        return FrameScore(nats, int(wrong), sum(piece.length for piece in pieces))

    def dev(self, model: AcousticModel, poll: Poll, *, own_statistics: bool = False) -> FrameScore:
        """All of the development set."""
        dev = self.corpus.dev
        return self.score(model, dev, cut(dev.lengths), poll, own_statistics=own_statistics)

    def population(self, model: AcousticModel, poll: Poll) -> Tensors:
        """Recalibrated statistics over training batches; none for a network that keeps none, or
        where all utterances are too long to train on."""
        if not self.config.normalisation.keeps_statistics:
            return {}
        batches = training_batches(self.config, self.corpus.train.lengths, epoch=0)

        def step(_: nn.Module, batch: Sequence[Piece]) -> Tensor:
            poll()
            share = read_batch(self.corpus.train, batch, self.device, self.ranks)
            return nothing(model) if share is None else model.features(share[0])

        some = batches[: self.config.evaluation.recalibrate_batches]
        return population_statistics(model, some, step) if some else {}

    def rows(
        self,
        model: AcousticModel,
        kinds: Mapping[StatisticsKind, Tensors],
        poll: Poll,
        *,
        fixed: bool = True,
        batch: bool = True,
    ) -> Iterator[Row]:
        """The development set with each kind of statistics, then with batch statistics.

        `fixed`: also the fixed training utterances, with the first kind.
        """
        if (self.corpus.dim, self.corpus.classes) != (len(model.mean), len(model.label_counts)):
            raise UserError(
                f"{self.corpus.path} has {self.corpus.dim} features and {self.corpus.classes}"
                f" states; the network has {len(model.mean)} and {len(model.label_counts)}"
            )
        for number, (kind, statistics) in enumerate(kinds.items()):
            with using(model, statistics):
                yield self.dev(model, poll).row("valid", kind)
                if fixed and self.fixed and number == 0:
                    train = self.score(model, self.corpus.train, self.fixed, poll)
                    yield train.row("train_eval", kind)
        norm = self.config.normalisation
        # One utterance has no statistics of its own in any time step.
        several = norm.pools != "step" or len(self.corpus.dev.lengths) > 1
        if batch and norm.keeps_statistics and several:
            yield self.dev(model, poll, own_statistics=True).row("valid", "batch")


def evaluate(run: RunDirectory, options: EvaluationOptions) -> dict[str, Any]:
    """The development set and the fixed training utterances under all statistics."""
    config, model = run.config(SpeechConfig), load(run, options.device)
    corpus = read_speech(options.data or config.data)
    evaluator = SpeechEvaluator(config, corpus, options.device)
    kinds = kinds_of_run(run, lambda: evaluator.population(model, never))
    rows = list(evaluator.rows(model, kinds, never))
    finite = finite_rows(rows)
    if not finite:
        raise UserError(f"the model of {run.path} gives no finite loss on {corpus.path}")
    same = config.data_sha256 in (corpus.sha256, corpus.labels_sha256)
    return {
        "data_sha256": corpus.sha256,
        "same_data": same,
        "rows": finite,
        "notes": left_out(rows) + _notes_on_recalibrated(kinds, same, config, corpus),
    }


def _notes_on_recalibrated(
    kinds: Mapping[StatisticsKind, Tensors], same: bool, config: SpeechConfig, corpus: SpeechCorpus
) -> list[str]:
    if "recalibrated" in kinds or not config.normalisation.keeps_statistics:
        return recalibrated_elsewhere(same, kinds, corpus.path)
    longest = config.train.max_frames
    return [
        f"no recalibrated statistics: no training utterance of {corpus.path} is within the"
        f" {longest:,} frames of --train.max-frames"
    ]
