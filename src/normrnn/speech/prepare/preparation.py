"""From utterances to a prepared directory: several processes, resumable, same bytes every time.

Results are appended to the archives in the order of the keys, and to a journal that says how far
these are good. A preparation that was killed cuts the archives there and goes on.
"""

import json
import math
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from normrnn.errors import UsageError, UserError, notice
from normrnn.files import following_no_link, read_regular, resolved
from normrnn.locks import exclusive
from normrnn.speech.archive import (
    Entry,
    Unusable,
    read_matrix,
    read_vector,
    write_matrix,
    write_vector,
)
from normrnn.speech.prepare.features import FRAME_SHIFT
from normrnn.speech.prepare.pool import in_order
from normrnn.speech.prepared import (
    CHECKSUMS,
    FORMAT,
    SKIPPED,
    SPLITS,
    STATISTICS,
    SUMMARY,
    digest,
    read_json,
    read_summary,
    write_checksums,
    write_json,
    write_text,
)

SETTINGS = ".preparation.json"
JOURNAL = ".journal.jsonl"
ARCHIVES = tuple(f"{split}/{name}.ark" for split in SPLITS for name in ("feats", "labels"))
_COMMIT_SECONDS = 1.0
_CRASHED = "the process that worked on it crashed, twice"
Record = dict[str, Any]


@dataclass(frozen=True)
class Utterance:
    """What to prepare; `problem` is why it cannot be, if that is known already."""

    key: str
    speaker: str
    split: str
    text: str
    source: Any
    problem: str = ""


@dataclass(frozen=True)
class Prepared:
    """Features (T, D) and labels (T,), the length of the sound, and what each cost in seconds."""

    features: NDArray[np.float32]
    labels: NDArray[np.int32]
    seconds: float
    feature_seconds: float = 0.0
    alignment_seconds: float = 0.0
    channels: int = 1


Work = Callable[[Utterance], Prepared]
"""Prepares one utterance or raises Unusable; sent to other processes."""
Report = Callable[[int, int, int], None]
"""Called with utterances done, of how many, and how many of these were skipped."""


@dataclass(frozen=True)
class Job:
    """All that decides the bytes of a prepared directory."""

    settings: dict[str, Any]
    """What a later start must agree with; goes into the summary."""
    source: dict[str, Any]
    """Where the data was found: it may move. Goes into the summary too."""
    utterances: Sequence[Utterance]
    """In the order of their keys."""
    work: Work
    classes: int


@dataclass(frozen=True)
class Costs:
    """What a preparation took, all starts together, in seconds of one core."""

    sound: float
    features: float
    alignment: float


def finished(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The summary if `out` is finished, None if there is work to do; an error if not ours to touch.

    A directory that was begun or finished with other settings is refused, and any other that is
    not empty.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; --out needs a directory")
    if not out.is_dir() or not any(out.iterdir()):
        return None
    if (out / SUMMARY).is_file():
        summary, state = read_summary(out), "holds data prepared"
        before = summary.get("settings", {})
    elif (out / SETTINGS).is_file():
        summary, state = None, "holds a preparation begun"
        before = read_json(out / SETTINGS)
    else:
        raise UsageError(f"{out} is not empty and holds no preparation: choose another --out")
    names = [n for n in {**before, **settings} if before.get(n) != settings.get(n)]
    if names:
        changed = ", ".join(
            f"{n} was {_abbreviated(before.get(n))}, is now {_abbreviated(settings.get(n))}"
            for n in names
        )
        raise UsageError(f"{out} {state} with other settings: {changed}; choose another --out")
    return summary


def prepare(job: Job, out: Path, processes: int, report: Report) -> tuple[dict[str, Any], Costs]:
    """Do what is left of the job; returns the summary."""
    for split in SPLITS:
        (out / split).mkdir(parents=True, exist_ok=True)
    if not (out / SETTINGS).is_file():
        write_json(out / SETTINGS, job.settings)
    with exclusive(out / SETTINGS, UserError(f"another process is preparing {out}")):
        with _Journal(out, job.utterances, job.classes) as journal:
            todo = job.utterances[len(journal.records) :]
            report(len(journal.records), len(job.utterances), journal.skipped)
            work = _Checked(job.work, job.classes)
            for utterance, result in zip(
                todo, in_order(work, todo, processes, _CRASHED), strict=True
            ):
                journal.add(utterance, result)
                report(len(journal.records), len(job.utterances), journal.skipped)
        summary = _finish(out, job, journal.records, journal.totals)
        for name in (JOURNAL, SETTINGS):
            (out / name).unlink()
    prepared = [record for record in journal.records if "frames" in record]
    sound, features, alignment = (sum(r["cost"][i] for r in prepared) for i in range(3))
    return summary, Costs(sound, features, alignment)


@dataclass(frozen=True)
class _Checked:
    """The work on one utterance, or why it cannot be done."""

    work: Work
    classes: int

    def __call__(self, utterance: Utterance) -> Prepared | str:
        if utterance.problem:
            return utterance.problem
        try:
            result = self.work(utterance)
            _check(result, self.classes)
        except Unusable as error:
            return str(error)
        return result


def _check(result: Prepared, classes: int) -> None:
    frames, labels = len(result.features), result.labels
    if len(labels) != frames:
        raise Unusable(f"its alignment has {len(labels)} frames, its features have {frames}")
    if frames == 0:
        raise Unusable("it has no frames")
    if not np.isfinite(result.features).all():
        raise Unusable("its features hold values that are no finite numbers")
    if labels.min() < 0 or labels.max() >= classes:
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise Unusable(f"its label {wrong} is outside the {classes} classes, numbered from 0")


class _Journal:
    """The archives, and a line per utterance on how far they are good."""

    def __init__(self, out: Path, utterances: Sequence[Utterance], classes: int) -> None:
        self.out = out
        self.records: list[Record] = []
        self.totals = _Totals(classes)
        # Only what an earlier process did is read: this one sees every result as it comes.
        for utterance, record in zip(utterances, _good_records(out, utterances), strict=False):
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

    def __enter__(self) -> "_Journal":
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

    def add(self, utterance: Utterance, result: Prepared | str) -> None:
        """Append one utterance, or the reason why there is none."""
        if not isinstance(result, str):
            columns = result.features.shape[1]
            self.dim = self.dim or columns
            if columns != self.dim:
                result = f"its features have {columns} columns, those before {self.dim}"
        record: Record = {"key": utterance.key}
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


class _Totals:
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
        lines = read_regular(out / JOURNAL).decode("utf-8", "replace").splitlines()
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


def _finish(out: Path, job: Job, records: Sequence[Record], totals: "_Totals") -> dict[str, Any]:
    """Everything but the archives; the summary last."""
    pairs = list(zip(job.utterances, records, strict=True))
    skipped = [(u, r["reason"]) for u, r in pairs if "reason" in r]
    write_text(out / SKIPPED, "".join(f"{u.key}\t{reason}\n" for u, reason in skipped))
    kept = {s: [(u, r) for u, r in pairs if u.split == s and "frames" in r] for s in SPLITS}
    for split in SPLITS:
        if not kept[split]:
            raise UserError(
                f"no utterance of the {split} set could be prepared:"
                f" {out / SKIPPED} says why, for each of {len(skipped):,}"
            )
        _write_tables(out / split, kept[split])
    checksums = {
        split: write_checksums(out / split, {u.key: tuple(r["sha256"]) for u, r in kept[split]})
        for split in SPLITS
    }
    counts = totals.label_counts
    statistics = totals.statistics()
    statistics["label_counts"] = counts["train"].tolist()
    write_json(out / STATISTICS, statistics)
    summary: dict[str, Any] = {
        "format": FORMAT,
        "classes": job.classes,
        "classes_seen": int((counts["train"] + counts["dev"] > 0).sum()),
        "dim": len(statistics["mean"]),
        "targets": job.settings["targets"],
        "frame_shift": FRAME_SHIFT,
    }
    for split in SPLITS:
        frames = sum(record["frames"] for _, record in kept[split])
        summary[split] = {
            "utterances": len(kept[split]),
            "frames": frames,
            "hours": frames * FRAME_SHIFT / 3600,
            "speakers": len({utterance.speaker for utterance, _ in kept[split]}),
            "classes_seen": int((counts[split] > 0).sum()),
        }
    summary["skipped"] = {"utterances": len(skipped), "share": len(skipped) / len(pairs)}
    summary["channels_averaged"] = sum("channels" in record for record in records)
    summary["settings"], summary["source"] = job.settings, job.source
    summary[CHECKSUMS] = checksums
    write_json(out / SUMMARY, summary)
    return summary


def _write_tables(folder: Path, kept: Sequence[tuple[Utterance, Record]]) -> None:
    def write(name: str, value: Callable[[Utterance, Record], Any]) -> None:
        write_text(
            folder / name, "".join(f"{u.key} {value(u, r)}".rstrip() + "\n" for u, r in kept)
        )

    absolute = resolved(folder)
    write("feats.scp", lambda _, r: f"{absolute}/feats.ark:{r['feats']}")
    write("labels.scp", lambda _, r: f"{absolute}/labels.ark:{r['labels']}")
    write("utt2spk", lambda u, _: u.speaker)
    write("text", lambda u, _: u.text)
    write("utt2num_frames", lambda _, r: r["frames"])


def _abbreviated(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"
