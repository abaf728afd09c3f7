"""The archives of a prepared directory while they grow, and how far they are good.

Results are appended in the order of the keys, and to a journal, a line each. Who goes on after a
kill cuts the archives where the journal ends.
"""

import json
import math
import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from normrnn.errors import notice
from normrnn.files import ROWS, following_no_link, read_regular
from normrnn.speech.archive import (
    Entry,
    Unusable,
    read_matrix,
    read_vector,
    write_matrix,
    write_vector,
)
from normrnn.speech.prepare.job import Prepared, Utterance
from normrnn.speech.prepared import SPLITS, digest, write_text

JOURNAL = ".journal.jsonl"
ARCHIVES = tuple(f"{split}/{name}.ark" for split in SPLITS for name in ("feats", "labels"))
CRASHED = "crashed"
_COMMIT_SECONDS = 1.0
Record = dict[str, Any]


class Journal:
    """The archives, and a line per utterance on how far they are good."""

    def __init__(self, out: Path, utterances: Sequence[Utterance], classes: int) -> None:
        self.out = out
        self.records: list[Record] = []
        self.totals = Totals(classes)
        # Only what an earlier process did is read: this one sees every result as it comes.
        for utterance, record in zip(utterances, _good_records(out, utterances), strict=False):
            if CRASHED in record:  # may have been a shortage of memory: tried again
                break
            if "frames" in record:
                try:
                    features, labels = _written(out / utterance.split, utterance.key, record)
                except Unusable as damage:
                    notice(f"{damage}; going on from there")
                    break
                self.totals.add(utterance.split, features, labels)
            self.records.append(record)
        self.skipped = sum("reason" in record for record in self.records)
        self.dim: int | None = next((r["dim"] for r in self.records if "dim" in r), None)
        self._files: dict[str, IO[bytes]] = {}
        self._committed = 0
        self._time = -math.inf  # the first result is on disk at once

    def __enter__(self) -> "Journal":
        ends = self.records[-1]["ends"] if self.records else [0] * len(ARCHIVES)
        for name, end in zip(ARCHIVES, ends, strict=True):
            # Not created by "a": what is appended there goes to the end, wherever one seeks.
            descriptor = following_no_link(str(self.out / name), os.O_RDWR | os.O_CREAT)
            self._files[name] = file = os.fdopen(descriptor, "r+b")
            file.truncate(end)
            file.seek(end)
        # A torn last line goes, and lines whose data did not reach the disk.
        self._rewrite()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            # Not appended to: what stopped us may have come in the middle of that.
            self._rewrite()
        finally:
            for file in self._files.values():
                file.close()

    def add(self, utterance: Utterance, result: Prepared | str | None) -> None:
        """Append one utterance, or the reason why there is none; None for a crash."""
        if isinstance(result, Prepared):
            columns = result.features.shape[1]
            self.dim = self.dim or columns
            if columns != self.dim:
                result = f"its features have {columns} columns, those before {self.dim}"
        record: Record = {"key": utterance.key}
        if result is None:
            record[CRASHED] = True
            result = "the process that worked on it crashed, twice"
        if isinstance(result, str):
            record["reason"] = " ".join(result.split())
            self.skipped += 1
        else:
            feats = self._files[f"{utterance.split}/feats.ark"]
            labels = self._files[f"{utterance.split}/labels.ark"]
            self.totals.add(utterance.split, result.features, result.labels)
            record["frames"], record["dim"] = result.features.shape
            record["feats"] = write_matrix(feats, utterance.key, result.features)
            record["labels"] = write_vector(labels, utterance.key, result.labels)
            record["sha256"] = digest(result.features), digest(result.labels)
            cost = (result.seconds, result.feature_seconds, result.alignment_seconds)
            record["cost"] = [round(seconds, 6) for seconds in cost]
            if result.channels > 1:
                record["channels"] = result.channels
        record["ends"] = [file.tell() for file in self._files.values()]
        self.records.append(record)
        if time.monotonic() - self._time > _COMMIT_SECONDS:
            self._commit()

    def _commit(self) -> None:
        """Data first, then the lines that vouch for it."""
        new = self.records[self._committed :]
        if not new:
            return
        self._flush()
        with open(self.out / JOURNAL, "a", encoding="utf-8", opener=following_no_link) as file:
            file.write("".join(map(_line, new)))
            file.flush()
            os.fsync(file.fileno())
        self._committed = len(self.records)
        self._time = time.monotonic()

    def _rewrite(self) -> None:
        self._flush()
        write_text(self.out / JOURNAL, "".join(map(_line, self.records)))
        self._committed = len(self.records)

    def _flush(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())


class Totals:
    """Label counts of every set; mean and biased variance of the training features, pooled in
    double precision."""

    def __init__(self, classes: int) -> None:
        self.label_counts = {split: np.zeros(classes, dtype=np.int64) for split in SPLITS}
        self._frames, self._mean, self._squares = 0, np.zeros(()), np.zeros(())

    def add(self, split: str, features: NDArray[np.float32], labels: NDArray[np.int32]) -> None:
        """One more utterance."""
        counts = self.label_counts[split]
        counts += np.bincount(labels, minlength=len(counts))
        if split != "train":
            return
        values = features.astype(np.float64)
        # Chan's merge of (count, mean, centred sum of squares).
        local, count = values.mean(axis=0), len(values)
        shift, total = local - self._mean, self._frames + count
        between = shift**2 * self._frames * count / total
        self._squares = self._squares + ((values - local) ** 2).sum(axis=0) + between
        self._mean = self._mean + shift * count / total
        self._frames = total

    def statistics(self) -> dict[str, Any]:
        """As statistics.json has them."""
        variance = self._squares / self._frames
        return {
            "frames": self._frames,
            "mean": self._mean.tolist(),
            "variance": variance.tolist(),
        }


def _line(record: Record) -> str:
    """A record with its checksum."""
    text = json.dumps(record)
    return f"{zlib.crc32(text.encode()):08x} {text}\n"


def _record(line: str) -> Record | None:
    """The record of a line; None if it is torn, damaged or of an older version."""
    crc, _, text = line.partition(" ")
    return json.loads(text) if crc == f"{zlib.crc32(text.encode()):08x}" else None


def _good_records(out: Path, utterances: Sequence[Utterance]) -> list[Record]:
    """The journal up to the last line that is whole and whose data is there."""
    try:
        lines = read_regular(out / JOURNAL, ROWS).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    sizes = [path.stat().st_size if (path := out / n).exists() else 0 for n in ARCHIVES]
    records: list[Record] = []
    for line, utterance in zip(lines, utterances, strict=False):
        record = _record(line)
        if record is None or record["key"] != utterance.key:
            break
        if any(end > size for end, size in zip(record["ends"], sizes, strict=True)):
            break
        records.append(record)
    return records


def _written(
    folder: Path, key: str, record: Record
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Features and labels that an earlier process wrote; Unusable if they are others now."""
    features = read_matrix(Entry(folder / "feats.ark", record["feats"]), key)
    labels = read_vector(Entry(folder / "labels.ark", record["labels"]), key)
    if [digest(features), digest(labels)] != list(record["sha256"]):
        raise Unusable(f"{folder} is damaged: {key} is not what was written")
    return features, labels
