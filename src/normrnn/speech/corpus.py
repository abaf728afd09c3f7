"""A directory of prepared speech.

    train, dev       feats.scp feats.ark labels.scp labels.ark utt2spk text utt2num_frames
                     checksums: of every utterance's features and labels
    summary.json     what it is and how it was made; written last: without it, not finished
    statistics.json  mean and variance of the training features, label counts
    skipped.tsv      utterance, reason

`prepare.preparation` writes it. Features are not normalised. Features and labels are read from
disk when needed, and verified whenever they are read.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normrnn.errors import UserError
from normrnn.files import ROWS, expanded, read_regular, sealed_json, write_whole
from normrnn.files import read_json as read_checked_json
from normrnn.speech.archive import read_matrix, read_table, read_vector, whole_number

FORMAT = "normrnn speech 1"
SPLITS = ("train", "dev")
SUMMARY = "summary.json"
STATISTICS = "statistics.json"
CHECKSUMS = "checksums"
Checksums = dict[str, tuple[str, str]]
"""Key -> hashes of features and labels."""


@dataclass(frozen=True)
class SpeechSplit:
    """Utterances of one split; only their positions are in memory."""

    keys: list[str]
    lengths: list[int]
    path: Path
    classes: int
    dim: int
    _offsets: list[tuple[int, int]] = field(repr=False)
    """Of every utterance's features in feats.ark, and labels in labels.ark."""
    _checksums: list[tuple[str, str]] = field(repr=False)

    def features(self, index: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Read frames start..stop of an utterance, (frames, D) float32."""
        path = self.path / "feats.ark"
        values = read_matrix(path, self._offsets[index][0])
        self._verify(path, index, values, 0)
        return torch.from_numpy(values[start:stop].copy())

    def labels(self, index: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Read the labels of frames start..stop of an utterance, (frames,) int64."""
        path = self.path / "labels.ark"
        values = read_vector(path, self._offsets[index][1])
        self._verify(path, index, values, 1)
        if not 0 <= values.min() <= values.max() < self.classes:
            raise UserError(
                f"{path}: {self.keys[index]} has a label outside the {self.classes} classes"
            )
        return torch.from_numpy(values[start:stop]).long()

    def _verify(self, path: Path, index: int, values: NDArray, which: int) -> None:
        intact = digest(values) == self._checksums[index][which]
        if not intact or len(values) != self.lengths[index]:
            raise UserError(f"{path} is damaged: {self.keys[index]} is not what was written")


@dataclass(frozen=True)
class SpeechCorpus:
    """A prepared directory; `mean` and `variance` (D,) are those of the training frames."""

    path: Path
    classes: int
    dim: int
    train: SpeechSplit
    dev: SpeechSplit
    mean: Tensor
    variance: Tensor
    label_counts: Tensor
    sha256: str
    """Hash of what a network learns from, wherever the directory is."""


def read_speech(path: str | Path) -> SpeechCorpus:
    """Open a prepared directory; UserError if anything is missing or does not fit."""
    path = expanded(path)
    if not path.is_dir():
        why = "it is a file" if path.exists() else "it does not exist"
        raise UserError(f"{path} is not a directory of prepared speech: {why}")
    summary = read_summary(path)
    statistics = read_json(path / STATISTICS)
    try:
        classes, dim = int(summary["classes"]), int(summary["dim"])
        hashes = [str(summary[CHECKSUMS][name]) for name in SPLITS]
        mean, variance = (
            torch.tensor(statistics[name], dtype=torch.float64) for name in ("mean", "variance")
        )
        counts = torch.tensor(statistics["label_counts"], dtype=torch.int64)
        if mean.shape != (dim,) or variance.shape != (dim,) or counts.shape != (classes,):
            raise ValueError
        if not (mean.isfinite().all() and (variance >= 0).all() and (counts >= 0).all()):
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError):
        raise UserError(
            f"{path / SUMMARY} or {STATISTICS} is damaged, or they do not belong together"
        ) from None
    train, dev = (
        _read_split(path / name, classes, dim, written)
        for name, written in zip(SPLITS, hashes, strict=True)
    )
    hashed = hashlib.sha256(json.dumps([FORMAT, classes, dim, statistics]).encode())
    for split in (train, dev):
        hashed.update(json.dumps([split.keys, split.lengths]).encode())
        hashed.update(json.dumps(split._checksums).encode())
    mean, variance = mean.float(), variance.float()
    sha256 = hashed.hexdigest()
    return SpeechCorpus(path, classes, dim, train, dev, mean, variance, counts, sha256)


def _read_split(path: Path, classes: int, dim: int, written: str) -> SpeechSplit:
    checksums = read_checksums(path, written)
    frames = read_table(path / "utt2num_frames")
    features, labels = (read_table(path / f"{name}.scp") for name in ("feats", "labels"))
    if not frames or not frames.keys() == features.keys() == labels.keys() == checksums.keys():
        raise UserError(f"{path} is empty or damaged: its tables have different keys")
    for name in ("feats.ark", "labels.ark"):
        if not (path / name).is_file():
            raise UserError(f"{path} lacks {name}")
    keys = sorted(frames)
    # The archives are those beside the tables, wherever the directory was moved.
    lengths = [_number(frames[key], path) for key in keys]
    offsets = [(_offset(features[key], path), _offset(labels[key], path)) for key in keys]
    hashes = [checksums[key] for key in keys]
    return SpeechSplit(keys, lengths, path, classes, dim, offsets, hashes)


def _offset(target: str, path: Path) -> int:
    return _number(target.rpartition(":")[2], path)


def _number(text: Any, path: Path) -> int:
    if not (number := whole_number(text)):
        raise UserError(f"{path} is damaged: {text!r} in its tables is not a number")
    return number


def read_summary(path: Path) -> dict[str, Any]:
    """Read the summary of a finished directory."""
    summary = read_json(path / SUMMARY)
    if summary.get("format") != FORMAT:
        raise UserError(f"{path / SUMMARY} is of format {summary.get('format')!r}, not {FORMAT!r}")
    return summary


def digest(values: NDArray) -> str:
    """Return the hash of features (T, D) or labels (T,), independent of their storage type."""
    kind = "<f4" if values.dtype.kind == "f" else "<i4"
    hashed = hashlib.sha256(repr(values.shape).encode())
    hashed.update(np.ascontiguousarray(values, dtype=kind).tobytes())
    return hashed.hexdigest()


def write_checksums(folder: Path, checksums: Checksums) -> str:
    """Write the hashes of one split; return the hash of the file, for the summary."""
    content = "".join(f"{key} {feats} {labels}\n" for key, (feats, labels) in checksums.items())
    write_whole(folder / CHECKSUMS, content.encode())
    return hashlib.sha256(content.encode()).hexdigest()


def read_checksums(folder: Path, written: str | None = None) -> Checksums:
    """Read them; UserError if the file's hash is not `written`."""
    table = read_table(folder / CHECKSUMS)
    found = hashlib.sha256(read_regular(folder / CHECKSUMS, ROWS)).hexdigest()
    pairs = {key: tuple(line.split()) for key, line in table.items()}
    if written not in (None, found) or any(len(pair) != 2 for pair in pairs.values()):
        raise UserError(f"{folder / CHECKSUMS} is damaged: it is not what was written")
    return {key: (pair[0], pair[1]) for key, pair in pairs.items()}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object with a checksum."""
    try:
        values, is_sealed = read_checked_json(path)
    except FileNotFoundError:
        raise UserError(
            f"{path.parent} is not a finished directory of prepared speech: it lacks {path.name}"
        ) from None
    if not is_sealed:
        raise UserError(f"{path} is damaged: its checksum is missing")
    return values


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file with its checksum, atomically."""
    write_whole(path, sealed_json(values))
