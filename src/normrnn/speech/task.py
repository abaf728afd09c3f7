"""Frame-wise speech recognition: the state of every frame of an utterance."""

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from normrnn.deploy.networks import Exportable
from normrnn.engine.model import SequenceModel
from normrnn.engine.task import Split, Task, evenly_spread
from normrnn.errors import UsageError, UserError
from normrnn.files import expanded, replacing, resolved, utf8_name
from normrnn.runs.environment import named_device
from normrnn.runs.store import RunDirectory
from normrnn.speech.archive import locate, read_matrix, read_table, write_matrix
from normrnn.speech.config import SpeechConfig
from normrnn.speech.corpus import INDEX, SpeechCorpus, digest, read_index, read_speech


class AcousticModel(SequenceModel):
    """Global mean and variance normalisation, LSTM stack, softmax over the alignment's states.

    Works on rows: the data (N, D) of a `PackedSequence`, N unpadded frames, step by step.
    Buffers hold what the training set says about features and states: `mean` and `variance` (D,),
    `label_counts` (C,). `options` are those of `SequenceModel`.

    >>> model = AcousticModel(dim=3, classes=5, hidden=4, layers=2, norm="sequence")
    >>> model(pack_sequence([torch.randn(7, 3), torch.randn(4, 3)])).shape
    torch.Size([11, 5])
    """

    variance: Tensor
    label_counts: Tensor

    def __init__(self, dim: int, classes: int, *, bidirectional: bool = True, **options: Any):
        super().__init__(dim, classes, bidirectional=bidirectional, **options)
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("variance", torch.ones(dim))
        self.register_buffer("label_counts", torch.ones(classes, dtype=torch.long))
        self.glorot()

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """Factors (D,) of the features without their mean."""
        # The clamp keeps rounding errors of a constant feature small.
        return self.variance.clamp(min=1e-8).rsqrt()

    def forward(self, utterances: PackedSequence) -> Tensor:
        """Return logits of the states, rows (N, C)."""
        return self.decoder(self.features(utterances)[0])

    def log_posteriors(self, features: Tensor) -> Tensor:
        """Return log posteriors of the states (T, C) for the features (T, D) of an utterance."""
        return self(pack_sequence([features])).log_softmax(1)

    def log_priors(self, floor: float = 1.0) -> Tensor:
        """Return logs of the states' shares (C,) of the training frames; each state counts as seen
        in at least `floor` frames, so that none gets an infinite likelihood."""
        counts = self.label_counts.double().clamp(min=floor)
        return (counts / counts.sum()).log().float()

    def read_piece(self, features: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return log posteriors (T, B, C) of a piece of utterances, and the state after it."""
        output, state = self.rnn(self.standardised(features), state)
        return self.decoder(output).log_softmax(-1), state

    def exportable(self) -> Exportable:
        """Return the network as a function of tensors."""
        return Exportable(
            _Exported(self),
            (torch.zeros(50, 2, len(self.mean)), torch.tensor([50, 30])),
            {"features": {0: "T", 1: "B"}, "lengths": {0: "B"}},
            ("log_posteriors",),
            usage=_USAGE.format(F=len(self.mean)),
        )


class _Exported(nn.Module):
    """A function: features (T, B, F), lengths (B,) -> log posteriors (T, B, C), 0 in padding."""

    mean: Tensor
    scale: Tensor

    def __init__(self, model: AcousticModel) -> None:
        super().__init__()
        self.register_buffer("mean", model.mean)
        self.register_buffer("scale", model.scale)
        self.rnn, self.decoder = model.rnn, model.decoder

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        output, _ = self.rnn((features - self.mean) * self.scale, lengths=lengths)
        time = torch.arange(features.shape[0], device=features.device)
        inside = (time[:, None] < lengths)[:, :, None]
        return torch.where(inside, self.decoder(output).log_softmax(-1), 0.0)


_USAGE = """
features, lengths = torch.randn(50, 2, {F}), [50, 30]  # padded (T, B, F)
rows = (features - values["mean"]) * values["scale"]
packed = torch.nn.utils.rnn.pack_padded_sequence(rows, lengths, enforce_sorted=False)
output, _ = torch.nn.utils.rnn.pad_packed_sequence(model.rnn(packed)[0])
log_posteriors = model.decoder(output).log_softmax(-1)  # (T, B, states)
"""


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


def test_utterances(corpus: SpeechCorpus, speakers: int) -> set[int]:
    """Return the training utterances of some speakers, evenly spread over the speakers' names."""
    names = sorted({entry.speaker for entry in corpus.train.entries})
    if speakers >= len(names):
        raise UserError(
            f"evaluation.test_speakers {speakers}: {corpus.path} has {len(names)} training"
            " speakers, and some must stay to train on"
        )
    chosen = {names[i] for i in evenly_spread(speakers, len(names))}
    return {i for i, entry in enumerate(corpus.train.entries) if entry.speaker in chosen}


class SpeechTask(Task):
    """Ragged batches of utterances, cross entropy and errors of every frame's state."""

    size_tensors: ClassVar = {"dim": "mean", "classes": "label_counts"}
    config: SpeechConfig
    model: AcousticModel

    def __init__(self, config: SpeechConfig, corpus: SpeechCorpus | None = None) -> None:
        if not config.data and corpus is None:
            raise UsageError(
                f"{config.recipe} needs prepared speech: pass --data DIR, made by normrnn prepare"
                " librispeech or normrnn prepare kaldi"
            )
        self.corpus = corpus = corpus or read_speech(config.data)
        tested, sha256 = test_utterances(corpus, config.evaluation.test_speakers), corpus.sha256
        if tested:  # speakers are not part of the hash
            sha256 = hashlib.sha256(f"{sha256} {sorted(tested)}".encode()).hexdigest()
        super().__init__(config, sha256, str(resolved(corpus.path)))
        self.splits = ("valid", "test") if tested else ("valid",)
        self.sizes = {"dim": corpus.dim, "classes": corpus.classes}
        self.pool = config.train.pool
        self.calibration_batches = config.evaluation.recalibrate_batches
        lengths, limit = corpus.train.lengths, config.train.max_frames
        pieces = cut(lengths, config.train.piece_frames)
        used = {i for i, length in enumerate(lengths) if not limit or length <= limit} - tested
        whole = [piece for piece in cut(lengths) if piece.utterance in used]
        fixed = evenly_spread(config.evaluation.train_utterances, len(whole))
        self.pieces = {
            "train": [piece for piece in pieces if piece.utterance in used],
            "valid": cut(corpus.dev.lengths),
            "train_eval": [whole[i] for i in fixed],
            "test": [piece for piece in cut(lengths) if piece.utterance in tested],
        }
        self.lengths = {s: [p.length for p in some] for s, some in self.pieces.items()}
        self.has_train_eval = bool(fixed)
        hours = sum(self.lengths["train"]) / 360_000
        self.source = (
            f"{corpus.path}: {len(used)} of {len(lengths)} training utterances, {hours:.2f} h,"
            f" {corpus.classes} states"
        )

    @classmethod
    def network(cls, config: SpeechConfig, *, dim: int, classes: int) -> AcousticModel:
        """Make a network."""
        m = config.model
        options = {"bidirectional": m.bidirectional, **m.options(config.normalisation)}
        return AcousticModel(dim, classes, **options)

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


@torch.no_grad()
def write_posteriors(
    run: Path, data: Path, prefix: Path, floor: float | None = None, device: str = "cpu"
) -> tuple[int, int]:
    """Write log posteriors of every utterance of `data` to `prefix`.ark and `prefix`.scp.

    With a `floor`, scaled log-likelihoods: minus the log priors of the training labels, each state
    counted as seen in at least so many frames. Both files are replaced at the end. Return the
    numbers of utterances and frames.
    """
    if floor is not None and not 0 < floor < math.inf:
        raise UsageError(f"--prior-floor must be positive and finite, not {floor}")
    utf8_name(prefix, "--out")
    if prefix.name in ("", ".."):
        raise UsageError(f"--out {prefix} is a directory: the archive needs a name in it")
    place = named_device(device)
    directory = RunDirectory(run)
    directory.config(SpeechConfig)
    model: AcousticModel = SpeechTask.load(directory, place)
    minus = 0.0 if floor is None else model.log_priors(floor)
    ark, scp = (prefix.with_name(f"{prefix.name}.{kind}") for kind in ("ark", "scp"))
    data, table = expanded(data), expanded(data) / "feats.scp"
    entries = {key: locate(target, data) for key, target in read_table(table).items()}
    read = {resolved(path) for path in (table, *(path for path, _ in entries.values()))}
    if taken := read & {resolved(ark), resolved(scp)}:
        raise UsageError(f"--out {prefix} would overwrite {min(taken)}, which is read")
    frames = 0
    ark.parent.mkdir(parents=True, exist_ok=True)
    with replacing(scp) as lines, replacing(ark) as archive:  # the archive comes first
        for key, features in _features(data, entries, len(model.mean)):
            rows = model.log_posteriors(features.to(place)) - minus
            offset = write_matrix(archive, key, rows.cpu().numpy())
            lines.write(f"{key} {resolved(ark)}:{offset}\n".encode())
            frames += len(rows)
        # A full disk is noticed here, before either file is replaced.
        for file in (archive, lines):
            file.flush()
            os.fsync(file.fileno())
        # If the process is killed between the two, no old offsets point into the new archive.
        scp.unlink(missing_ok=True)
    return len(entries), frames


def _features(
    data: Path, entries: dict[str, tuple[Path, int]], dim: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield key and features of every utterance; those of a prepared directory are verified."""
    index = read_index(data) if (data / INDEX).is_file() else []
    hashes = {entry.key: entry.hashes[0] for entry in index}
    for key, (path, offset) in entries.items():
        values = read_matrix(path, offset)
        if hashes.get(key) not in (None, digest(values)):
            raise UserError(f"{path} is damaged: checksum mismatch in {key}")
        features = torch.from_numpy(values)
        if features.shape[1] != dim or not features.isfinite().all():
            raise UserError(
                f"{key} of {data} has {features.shape[1]} features a frame, or some that are not"
                f" finite; the network was trained on {dim}"
            )
        yield key, features
