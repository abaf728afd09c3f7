"""A directory of prepared speech.

    train, dev     feats.scp feats.ark labels.scp labels.ark utt2spk text, as Kaldi has them
                   index: where every utterance is in the archives, and its hashes
    settings.json  what determines the preparation
    summary.json   what was prepared, mean and variance of the training features, label counts,
                   hashes of the two indices; written last: without it, not finished
    skipped.tsv    utterance, reason

`prepare.preparation` writes it. Features are not normalised. Features and labels are read from
disk when needed, and verified whenever they are read.
"""

import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normrnn.errors import UserError
from normrnn.files import ROWS, expanded, read_regular, read_sealed_json
from normrnn.speech.archive import read_matrix, read_vector

FORMAT = "normrnn speech 1"
SPLITS = ("train", "dev")
ARCHIVES = ("feats.ark", "labels.ark")
INDEX = "index"
SUMMARY = "summary.json"


class Entry(NamedTuple):
    """An utterance of a split: a line of its index. Pairs are of features and labels."""

    key: str
    speaker: str
    frames: int
    starts: tuple[int, int]  # where they are in the archives
    ends: tuple[int, int]
    hashes: tuple[str, str]

    def encode(self) -> bytes:
        """Return the line: a checksum and JSON."""
        text = json.dumps(self).encode()
        return f"{zlib.crc32(text):08x} ".encode() + text

    @classmethod
    def decode(cls, line: bytes) -> "Entry":
        """Read a line; ValueError for damage."""
        if int(line[:8], 16) != zlib.crc32(line[9:]):
            raise ValueError
        return cls(*json.loads(line[9:]))


@dataclass(frozen=True)
class SpeechSplit:
    """Utterances of one split; only their index is in memory."""

    path: Path
    entries: list[Entry]

    @cached_property
    def keys(self) -> list[str]:
        """Names of the utterances."""
        return [entry.key for entry in self.entries]

    @cached_property
    def lengths(self) -> list[int]:
        """Numbers of frames."""
        return [entry.frames for entry in self.entries]

    def features(self, index: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Read frames start..stop of an utterance, (frames, D) float32."""
        return torch.from_numpy(self._read(index, 0, read_matrix)[start:stop].copy())

    def labels(self, index: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Read the labels of frames start..stop of an utterance, (frames,) int64."""
        return torch.from_numpy(self._read(index, 1, read_vector)[start:stop]).long()

    def _read(self, index: int, which: int, read: Callable[[Path, int], NDArray]) -> NDArray:
        entry, path = self.entries[index], self.path / ARCHIVES[which]
        values = read(path, entry.starts[which])
        if digest(values) != entry.hashes[which]:
            raise UserError(f"{path} is damaged: checksum mismatch in {entry.key}")
        return values


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
    sha256: str  # hash of what a network learns from, wherever the directory is


def read_speech(path: str | Path) -> SpeechCorpus:
    """Open a prepared directory; UserError if anything is missing or does not fit."""
    path = expanded(path)
    summary = read_summary(path)
    try:
        classes, dim, statistics = (summary[name] for name in ("classes", "dim", "statistics"))
        mean, variance = (torch.tensor(statistics[name]) for name in ("mean", "variance"))
        counts = torch.tensor(statistics["label_counts"])
        if (mean.shape, variance.shape, counts.shape) != ((dim,), (dim,), (classes,)):
            raise ValueError
        hashes = [summary[name]["index"] for name in SPLITS]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path / SUMMARY} is damaged: its entries do not fit") from None
    hashed = hashlib.sha256(json.dumps([FORMAT, classes, dim, statistics]).encode())
    splits = []
    for name, written in zip(SPLITS, hashes, strict=True):
        split = SpeechSplit(path / name, read_index(path / name, written))
        hashed.update(json.dumps([split.keys, split.lengths]).encode())
        hashed.update(json.dumps([entry.hashes for entry in split.entries]).encode())
        splits.append(split)
    train, dev = splits
    sha256 = hashed.hexdigest()
    return SpeechCorpus(path, classes, dim, train, dev, mean, variance, counts, sha256)


def read_summary(path: Path) -> dict[str, Any]:
    """Read the summary of a finished directory."""
    try:
        summary = read_sealed_json(path / SUMMARY)
    except FileNotFoundError:
        raise UserError(f"{path} is not a directory of prepared speech: no {SUMMARY}") from None
    if summary.get("format") != FORMAT:
        raise UserError(f"{path / SUMMARY} is of format {summary.get('format')!r}, not {FORMAT!r}")
    return summary


def digest(values: NDArray) -> str:
    """Return the hash of features (T, D) or labels (T,), independent of their storage type."""
    kind = "<f4" if values.dtype.kind == "f" else "<i4"
    hashed = hashlib.sha256(repr(values.shape).encode())
    hashed.update(np.ascontiguousarray(values, dtype=kind).tobytes())
    return hashed.hexdigest()


def read_index(folder: Path, written: str | None = None) -> list[Entry]:
    """Read the index of a split, by key; UserError if its hash is not `written`."""
    path = folder / INDEX
    try:
        content = read_regular(path, ROWS)
        if written not in (None, hashlib.sha256(content).hexdigest()):
            raise ValueError
        return sorted(Entry.decode(line) for line in content.splitlines())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError):
        raise UserError(f"{path} is damaged: checksum mismatch; prepare it again") from None
