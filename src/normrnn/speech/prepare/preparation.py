"""From utterances to a prepared directory: several processes, resumable, same bytes every time."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normrnn.errors import UsageError, UserError
from normrnn.files import replacing, resolved
from normrnn.locks import exclusive
from normrnn.runs.names import LOCK
from normrnn.speech.archive import CHECKSUMS, Unusable, write_matrix, write_vector
from normrnn.speech.prepare.features import FRAME_SHIFT
from normrnn.speech.prepare.job import Job, Prepared, Utterance, Work
from normrnn.speech.prepare.parts import PARTS, read_part, write_part
from normrnn.speech.prepare.pool import in_order
from normrnn.speech.prepared import (
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
ARCHIVES = tuple((split, name) for split in SPLITS for name in ("feats", "labels"))
CRASHED = "the process that worked on it crashed, twice"

Report = Callable[[int, int, int], None]
"""Called with the utterances done, their total, and how many of those done were skipped."""


def finished(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the summary if `out` is finished, None if there is work to do.

    UsageError for a directory that was begun or finished with other settings, or that has other
    files. Utterances that crashed a process are work to do.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; --out needs a directory")
    if not out.is_dir() or all(path.name == LOCK for path in out.iterdir()):
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
    if names == ["data"]:
        raise UsageError(
            f"{out} {state} from other data, or by an older version; choose another --out"
        )
    if names:
        changed = ", ".join(
            f"{n} was {_abbreviated(before.get(n))}, is now {_abbreviated(settings.get(n))}"
            for n in names
        )
        raise UsageError(f"{out} {state} with other settings: {changed}; choose another --out")
    return None if (out / PARTS).is_dir() else summary


def prepare(job: Job, out: Path, processes: int, report: Report) -> dict[str, Any]:
    """Do what is left of the job; return the summary."""
    out.mkdir(parents=True, exist_ok=True)
    # The lock is a file of its own, which is never replaced or removed.
    with exclusive(out / LOCK, UserError(f"another process is preparing {out}")):
        if (done := finished(out, job.settings)) is not None:  # by another process, just now
            return done
        write_json(out / SETTINGS, job.settings)
        (out / SUMMARY).unlink(missing_ok=True)
        for name in (*SPLITS, PARTS):
            (out / name).mkdir(exist_ok=True)
        parts = [out / PARTS / f"{number:08}" for number in range(len(job.utterances))]
        pairs = list(zip(job.utterances, parts, strict=True))
        found = [read_part(path, u.key) for u, path in pairs if path.exists()]
        ready = {part.record["key"]: "reason" in part.record for part in found if part is not None}
        todo = [(u, path) for u, path in pairs if u.key not in ready]
        count, skipped = len(ready), sum(ready.values())
        del found
        report(count, len(pairs), skipped)
        work, crashes = _Checked(job.work, job.classes), 0
        results = in_order(work, [u for u, _ in todo], processes, None)
        for (utterance, path), result in zip(todo, results, strict=True):
            if result is None:  # may have been a shortage of memory: the next start tries again
                path.unlink(missing_ok=True)
                crashes, skipped = crashes + 1, skipped + 1
            else:
                skipped += "reason" in write_part(path, utterance.key, result)
            count += 1
            report(count, len(pairs), skipped)
        summary = _assemble(out, job, pairs)
        (out / SETTINGS).unlink()
        if not crashes:
            shutil.rmtree(out / PARTS)
    return summary


@dataclass(frozen=True)
class _Checked:
    """The work on one utterance; returns the reason if it cannot be done."""

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
        raise Unusable("its features have values that are not finite")
    if labels.min() < 0 or labels.max() >= classes:
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise Unusable(f"its label {wrong} is outside the {classes} classes, numbered from 0")


@dataclass(frozen=True)
class _Kept:
    """An utterance in the archives."""

    utterance: Utterance
    frames: int
    offsets: dict[str, int]
    hashes: tuple[str, str]


def _assemble(out: Path, job: Job, pairs: Sequence[tuple[Utterance, Path]]) -> dict[str, Any]:
    """Write the archives from the parts, then the tables, and the summary last."""
    totals = _Totals(job.classes)
    kept: dict[str, list[_Kept]] = {split: [] for split in SPLITS}
    skipped: list[tuple[str, str]] = []
    dim, averaged = None, 0
    with ExitStack() as stack:
        files = {
            (split, name): stack.enter_context(replacing(out / split / f"{name}.ark"))
            for split, name in ARCHIVES
        }
        for u, path in pairs:
            part = read_part(path, u.key)
            record: dict[str, Any] = {"reason": CRASHED} if part is None else part.record
            columns = 0 if part is None else part.features.shape[1]
            if part is None or "reason" in record or columns != (dim or columns):
                other = f"its features have {columns} columns, those before {dim}"
                skipped.append((u.key, record.get("reason", other)))
                continue
            dim, features, labels = columns, part.features, part.labels
            offsets = {
                "feats": write_matrix(files[u.split, "feats"], u.key, features),
                "labels": write_vector(files[u.split, "labels"], u.key, labels),
            }
            hashes = digest(features), digest(labels)
            kept[u.split].append(_Kept(u, len(features), offsets, hashes))
            totals.add(u.split, features, labels)
            averaged += record["channels"] > 1
        lines = (f"{_one_line(key)}\t{_one_line(reason)}\n" for key, reason in skipped)
        write_text(out / SKIPPED, "".join(lines))
        for split in SPLITS:
            if not kept[split]:
                raise UserError(
                    f"no utterance of the {split} set could be prepared:"
                    f" {out / SKIPPED} has the reason for each of {len(skipped):,}"
                )
    checksums = {}
    for split in SPLITS:
        _write_tables(out / split, kept[split])
        hashes = {one.utterance.key: one.hashes for one in kept[split]}
        checksums[split] = write_checksums(out / split, hashes)
    counts, statistics = totals.label_counts, totals.statistics()
    write_json(out / STATISTICS, statistics)
    summary: dict[str, Any] = {
        "format": FORMAT,
        "classes": job.classes,
        "classes_seen": int((counts["train"] + counts["dev"] > 0).sum()),
        "dim": dim,
        "targets": job.settings["targets"],
        "frame_shift": FRAME_SHIFT,
    }
    for split in SPLITS:
        frames = sum(one.frames for one in kept[split])
        summary[split] = {
            "utterances": len(kept[split]),
            "frames": frames,
            "hours": frames * FRAME_SHIFT / 3600,
            "speakers": len({one.utterance.speaker for one in kept[split]}),
            "classes_seen": int((counts[split] > 0).sum()),
        }
    summary["skipped"] = {"utterances": len(skipped), "share": len(skipped) / len(pairs)}
    summary["channels_averaged"] = averaged
    summary["settings"], summary["source"] = job.settings, job.source
    summary[CHECKSUMS] = checksums
    write_json(out / SUMMARY, summary)
    return summary


class _Totals:
    """Label counts of every split; mean and biased variance of the training features, pooled in
    double precision."""

    def __init__(self, classes: int) -> None:
        self.label_counts = {split: np.zeros(classes, dtype=np.int64) for split in SPLITS}
        self._frames, self._mean, self._squares = 0, np.zeros(()), np.zeros(())

    def add(self, split: str, features: NDArray[np.float32], labels: NDArray[np.int32]) -> None:
        """Add an utterance."""
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
        """Return the content of statistics.json."""
        return {
            "frames": self._frames,
            "mean": self._mean.tolist(),
            "variance": (self._squares / self._frames).tolist(),
            "label_counts": self.label_counts["train"].tolist(),
        }


def _write_tables(folder: Path, kept: Sequence[_Kept]) -> None:
    def write(name: str, value: Callable[[_Kept], Any]) -> None:
        lines = (f"{one.utterance.key} {value(one)}".rstrip() + "\n" for one in kept)
        write_text(folder / name, "".join(lines))

    absolute = resolved(folder)
    write("feats.scp", lambda one: f"{absolute}/feats.ark:{one.offsets['feats']}")
    write("labels.scp", lambda one: f"{absolute}/labels.ark:{one.offsets['labels']}")
    write("utt2spk", lambda one: one.utterance.speaker)
    write("text", lambda one: one.utterance.text)
    write("utt2num_frames", lambda one: one.frames)


def _one_line(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]


def _abbreviated(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"
