"""The files of a directory of prepared speech.

    train, dev       feats.scp feats.ark labels.scp labels.ark utt2spk text utt2num_frames
                     checksums: of every utterance's features and labels
    summary.json     what it is and how it was made; written last: without it, not finished
    statistics.json  mean and variance of the training features, label counts
    skipped.tsv      utterance, reason

`preparation` writes it, `corpus` reads it. Features are not normalised.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normrnn import seal
from normrnn.errors import UserError
from normrnn.files import ROWS, read_regular, write_whole
from normrnn.speech.archive import CHECKSUMS, read_table

FORMAT = "normrnn speech 1"
SPLITS = ("train", "dev")
SUMMARY = "summary.json"
STATISTICS = "statistics.json"
SKIPPED = "skipped.tsv"
Checksums = dict[str, tuple[str, str]]
"""Key -> hashes of features and labels."""


def read_summary(path: Path) -> dict[str, Any]:
    """Read the summary of a finished directory."""
    if not (path / SUMMARY).is_file():
        raise UserError(
            f"{path} is not a finished directory of prepared speech: it has no {SUMMARY}"
            " (normrnn prepare librispeech or kaldi makes one)"
        )
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
    write_text(folder / CHECKSUMS, content)
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
        values, is_sealed = seal.read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path.parent} lacks {path.name}") from None
    if not is_sealed:
        raise UserError(f"{path} is damaged: its checksum is missing")
    return values


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file with its checksum, atomically."""
    write_whole(path, seal.sealed_json(values))


def write_text(path: Path, text: str) -> None:
    """Write a text file, atomically."""
    write_whole(path, text.encode())
