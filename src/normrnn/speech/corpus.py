"""Prepared speech; features and labels are read from disk when needed."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normrnn.errors import UserError
from normrnn.files import expanded, file_state, resolved
from normrnn.speech.archive import (
    CHECKSUMS,
    Entry,
    count_rows,
    locate,
    read_matrix,
    read_table,
    read_vector,
    whole_number,
)
from normrnn.speech.prepared import (
    FORMAT,
    SPLITS,
    STATISTICS,
    SUMMARY,
    Checksums,
    digest,
    read_checksums,
    read_json,
    read_summary,
)


@dataclass(frozen=True)
class SpeechSplit:
    """Utterances of one split; only their positions are in memory."""

    keys: list[str]
    lengths: list[int]
    path: Path
    classes: int
    dim: int
    _features: list[Entry] = field(repr=False)
    _labels: list[Entry] = field(repr=False)
    _checksums: Checksums = field(repr=False, default_factory=dict)
    _verified: dict[tuple[int, str], tuple[int, ...]] = field(repr=False, default_factory=dict)
    """Objects whose hash was verified, with the state of their archive then: while that stays the
    same, slices are read without verification."""

    def features(self, index: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Read frames start..stop of an utterance, (frames, D) float32."""
        key, entry = self.keys[index], self._features[index]
        values = self._read(read_matrix, 0, entry, key, start, stop)
        self._check(entry, index, len(values), start, stop)
        if values.shape[1] != self.dim:
            raise UserError(
                f"{entry.path}: {key} has {values.shape[1]} features a frame, not {self.dim}"
            )
        return torch.from_numpy(values)

    def labels(self, index: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Read the labels of frames start..stop of an utterance, (frames,) int64."""
        key, entry = self.keys[index], self._labels[index]
        values = torch.from_numpy(self._read(read_vector, 1, entry, key, start, stop)).long()
        self._check(entry, index, len(values), start, stop)
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) < self.classes:
            wrong = values[(values < 0) | (values >= self.classes)]
            raise UserError(
                f"{entry.path}: a label of {key} is {int(wrong[0])}; there are {self.classes}"
                " classes, numbered from 0"
            )
        return values

    def _read(
        self, read: Callable, which: int, entry: Entry, key: str, start: int, stop: int | None
    ) -> Any:
        if key not in self._checksums:
            return read(entry, key, start, stop)
        state = file_state(entry.path)
        if self._verified.get((which, key)) == state:
            return read(entry, key, start, stop)
        values = read(entry, key)
        if digest(values) != self._checksums[key][which]:
            raise UserError(f"{entry.path} is damaged: {key} is not what was written")
        self._verified[which, key] = state
        return values[start:stop]

    def _check(self, entry: Entry, index: int, got: int, start: int, stop: int | None) -> None:
        expected = len(range(*slice(start, stop).indices(self.lengths[index])))
        if got != expected:
            raise UserError(
                f"{entry.path} and utt2num_frames disagree on the length of {self.keys[index]}"
            )


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
        mean, variance = (
            torch.tensor(statistics[name], dtype=torch.float64) for name in ("mean", "variance")
        )
        counts = torch.tensor(statistics["label_counts"], dtype=torch.int64)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError):
        raise UserError(
            f"{path / SUMMARY} or {STATISTICS} is damaged: a field is missing"
        ) from None
    if mean.shape != (dim,) or variance.shape != (dim,) or counts.shape != (classes,):
        raise UserError(f"{path / STATISTICS} does not belong to {SUMMARY}: other sizes")
    if not (mean.isfinite().all() and (variance >= 0).all() and (counts >= 0).all()):
        raise UserError(f"{path / STATISTICS} is damaged: its numbers are not statistics")
    train, dev = (_read_split(path / name, classes, dim, summary) for name in SPLITS)
    hashed = hashlib.sha256(json.dumps([FORMAT, classes, dim, statistics]).encode())
    for split in (train, dev):
        hashed.update(json.dumps([split.keys, split.lengths]).encode())
        hashed.update(json.dumps([split._checksums.get(key) for key in split.keys]).encode())
    mean, variance = mean.float(), variance.float()
    sha256 = hashed.hexdigest()
    return SpeechCorpus(path, classes, dim, train, dev, mean, variance, counts, sha256)


class Features:
    """The features of a Kaldi data directory, whose feats.scp is read once."""

    def __init__(self, directory: str | Path) -> None:
        self.path = path = expanded(directory)
        self.table = path / "feats.scp"
        parts = [f"{path / name}" for name in SPLITS if (path / name / "feats.scp").is_file()]
        if parts and not self.table.exists():
            raise UserError(f"{path} has no feats.scp; its parts have one: {' or '.join(parts)}")
        self._entries = {
            key: locate(target, path) for key, target in read_table(self.table).items()
        }

    def files(self) -> set[Path]:
        """Return the files that are read."""
        return {resolved(path) for path in (self.table, *(e.path for e in self._entries.values()))}

    def count_frames(self) -> int:
        """Count the frames of all utterances, from headers."""
        return sum(count_rows(entry, key) for key, entry in self._entries.items())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield key and features (T, D) float32 of every utterance."""
        verified = (self.path / CHECKSUMS).is_file()
        checksums = read_checksums(self.path) if verified else {}
        for key, entry in self._entries.items():
            values = read_matrix(entry, key)
            if key in checksums and digest(values) != checksums[key][0]:
                raise UserError(f"{entry.path} is damaged: {key} is not what was written")
            yield key, torch.from_numpy(values)


def _read_split(path: Path, classes: int, dim: int, summary: dict[str, Any]) -> SpeechSplit:
    hashes = summary.get(CHECKSUMS)
    written = hashes.get(path.name) if isinstance(hashes, dict) else None
    if not isinstance(written, str):
        raise UserError(f"{path.parent / SUMMARY} is damaged: it lacks the hash of {path.name}")
    checksums = read_checksums(path, written)
    lengths = {key: _frames(path, key, n) for key, n in read_table(path / "utt2num_frames").items()}
    keys = sorted(lengths)
    if not keys:
        raise UserError(f"{path} holds no utterances")
    entries = []
    for name in ("feats", "labels"):
        table = read_table(path / f"{name}.scp")
        if table.keys() != lengths.keys():
            odd = min(table.keys() ^ lengths.keys())
            raise UserError(f"{path}: {odd} is in only one of {name}.scp and utt2num_frames")
        if not (path / f"{name}.ark").is_file():
            raise UserError(f"{path} lacks {name}.ark")
        entries.append([locate(table[key], path) for key in keys])
    frames = [lengths[key] for key in keys]
    if checksums.keys() != lengths.keys():
        odd = min(checksums.keys() ^ lengths.keys())
        raise UserError(f"{path}: {odd} is in only one of {CHECKSUMS} and utt2num_frames")
    return SpeechSplit(keys, frames, path, classes, dim, entries[0], entries[1], checksums)


def _frames(path: Path, key: str, text: str) -> int:
    frames = whole_number(text)
    if not frames:
        raise UserError(f"{path / 'utt2num_frames'} is damaged at {key}: no number of frames")
    return frames
