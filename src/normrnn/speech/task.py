"""Frame-wise speech recognition: the state of every frame of an utterance."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from normrnn.engine.batches import evenly_spread
from normrnn.engine.exported import ExportedClassifier
from normrnn.engine.statistics import Tensors
from normrnn.engine.task import Split, Task
from normrnn.errors import UsageError, UserError
from normrnn.files import resolved
from normrnn.speech.config import SpeechConfig
from normrnn.speech.corpus import SpeechCorpus, read_speech
from normrnn.speech.model import AcousticModel


class Piece(NamedTuple):
    """Frames `start` to `stop` of an utterance."""

    utterance: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of frames."""
        return self.stop - self.start


def cut(lengths: Sequence[int], longest: int = 0) -> list[Piece]:
    """Cut utterances into pieces of nearly equal length and at most `longest` frames; 0: whole.

    >>> [piece[1:] for piece in cut([5, 3], 2)]
    [(0, 1), (1, 3), (3, 5), (0, 1), (1, 3)]
    """
    pieces = []
    for utterance, length in enumerate(lengths):
        parts = -(-length // longest) if longest else 1
        bounds = [length * i // parts for i in range(parts + 1)]
        pieces += [Piece(utterance, a, b) for a, b in pairwise(bounds)]
    return pieces


class SpeechTask(Task):
    """Ragged batches of utterances, cross entropy and errors of every frame's state."""

    config: SpeechConfig
    model: AcousticModel

    def __init__(self, config: SpeechConfig, corpus: SpeechCorpus | None = None) -> None:
        if not config.data and corpus is None:
            raise UsageError(
                f"{config.recipe} needs prepared speech: pass --data DIR, made by normrnn prepare"
                " librispeech or normrnn prepare kaldi"
            )
        self.corpus = corpus = corpus or read_speech(config.data)
        super().__init__(config, corpus.sha256, str(resolved(corpus.path)))
        self.sizes = {"dim": corpus.dim, "classes": corpus.classes}
        self.pool = config.train.pool
        self.calibration_batches = config.evaluation.recalibrate_batches
        lengths, limit = corpus.train.lengths, config.train.max_frames
        pieces = cut(lengths, config.train.piece_frames)
        used = {i for i, length in enumerate(lengths) if not limit or length <= limit}
        whole = [piece for piece in cut(lengths) if piece.utterance in used]
        fixed = evenly_spread(config.evaluation.train_utterances, len(whole))
        self.pieces = {
            "train": [piece for piece in pieces if piece.utterance in used],
            "valid": cut(corpus.dev.lengths),
            "train_eval": [whole[i] for i in fixed],
        }
        self.lengths = {s: [p.length for p in some] for s, some in self.pieces.items()}
        self.has_train_eval = bool(fixed)
        hours = sum(self.lengths["train"]) / 360_000
        self.source = (
            f"{corpus.path}: {len(used)} utterances, {hours:.2f} h, {corpus.classes} states"
        )
        if len(used) < len(lengths):
            share = 1 - len(used) / len(lengths)
            self.source += (
                f"; {len(lengths) - len(used)} of {len(lengths)} ({share:.1%}) left out:"
                f" over {limit} frames"
            )

    @classmethod
    def open(cls, config: SpeechConfig, model: Any = None) -> "SpeechTask":
        """Read the data of a config; UserError if it cannot be trained on."""
        task, batch = super().open(config, model), config.train.batch
        count = len(task.pieces["train"])
        if model is None and not count:
            raise UserError(
                f"no training utterance of {config.data} has at most {config.train.max_frames}"
                " frames"
            )
        if model is None and config.normalisation.keeps_statistics and min(batch, count) < 2:
            raise UserError(
                "statistics over one utterance are its own: train.batch must be at least 2"
            )
        return task

    @classmethod
    def network(cls, config: SpeechConfig, *, dim: int, classes: int) -> AcousticModel:
        """Make a network."""
        m = config.model
        return AcousticModel(
            dim,
            classes,
            m.hidden,
            m.layers,
            bidirectional=m.bidirectional,
            **m.options(config.normalisation),
        )

    @classmethod
    def saved_sizes(cls, weights: Tensors, files: Any) -> dict[str, Any]:  # noqa: ARG003
        """Return the sizes of a saved network."""
        return {
            "dim": len(weights.get("mean", ())),
            "classes": len(weights.get("label_counts", ())),
        }

    def check_model(self, model: AcousticModel) -> None:
        """Raise UserError if the data has other features or states than a network."""
        dim, classes = len(model.mean), len(model.label_counts)
        if (self.corpus.dim, self.corpus.classes) != (dim, classes):
            raise UserError(
                f"{self.corpus.path} has {self.corpus.dim} features and {self.corpus.classes}"
                f" states; the network has {dim} and {classes}"
            )

    def initialise(self, model: AcousticModel) -> None:
        """Set statistics of the training features and counts of the labels."""
        for name in ("mean", "variance", "label_counts"):
            getattr(model, name).copy_(getattr(self.corpus, name))

    def read(self, split: Split, indices: list[int]) -> tuple[PackedSequence, Tensor]:
        """Return the features of some pieces, longest first, and the labels of their rows (N,)."""
        source = self.corpus.dev if split == "valid" else self.corpus.train
        pieces = [self.pieces[split][i] for i in indices]
        features = pack_sequence([source.features(*piece).to(self.device) for piece in pieces])
        labels = pack_sequence([source.labels(*piece) for piece in pieces])
        return features, labels.data.to(self.device)

    def exported(self, session: Any) -> nn.Module:
        """Return a network that runs an ONNX session."""
        return ExportedClassifier(session)
