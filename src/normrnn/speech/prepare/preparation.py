"""From utterances to a prepared directory: several processes, resumable, same bytes every time."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normrnn.errors import UsageError, UserError
from normrnn.files import exclusive, replacing, resolved, write_whole
from normrnn.runs.records import LOCK
from normrnn.speech.archive import write_matrix, write_vector
from normrnn.speech.corpus import (
    CHECKSUMS,
    FORMAT,
    SPLITS,
    STATISTICS,
    SUMMARY,
    digest,
    read_json,
    read_summary,
    write_checksums,
    write_json,
)
from normrnn.speech.prepare.features import FRAME_SHIFT
from normrnn.speech.prepare.job import Job, Prepared, PrepareOne, Utterance, in_order, read_part

PARTS = ".parts"
"""Directory with the results of single utterances, until all are there."""
SETTINGS = ".preparation.json"
"""Settings of a preparation that is not finished."""
SKIPPED = "skipped.tsv"
OBJECTS = ("feats", "labels")
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
    summary = None
    if (out / SETTINGS).is_file():
        before = read_json(out / SETTINGS)
    elif (out / SUMMARY).is_file():
        summary = read_summary(out)
        before = summary.get("settings", {})
    else:
        raise UsageError(f"{out} is not empty and holds no preparation: choose another --out")
    changed = [
        f"{name} was {before.get(name)}, is now {settings.get(name)}"
        for name in {**before, **settings}
        if before.get(name) != settings.get(name)
    ]
    if changed:
        raise UsageError(
            f"{out} was prepared with other settings: {', '.join(changed)}; choose another --out"
        )
    return summary


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
        items = [(u, out / PARTS / f"{n:08}") for n, u in enumerate(job.utterances)]
        todo, skipped = [], 0
        for utterance, path in items:
            if (part := read_part(path, utterance.key)) is None:
                todo.append((utterance, path))
            else:
                skipped += bool(part.reason)
        report(len(items) - len(todo), len(items), skipped)
        crashed = False
        results = in_order(PrepareOne(job.work), todo, processes)
        for left, was_skipped in zip(reversed(range(len(todo))), results, strict=True):
            if was_skipped is None:  # may have been a shortage of memory
                crashed = was_skipped = True
            skipped += was_skipped
            report(len(items) - left, len(items), skipped)
        summary = _assemble(out, job, items)
        if not crashed:  # else the next start tries these utterances again
            (out / SETTINGS).unlink()
            shutil.rmtree(out / PARTS)
    return summary


class _Row(NamedTuple):
    """An utterance in the archives."""

    utterance: Utterance
    frames: int
    offsets: tuple[int, int]
    hashes: tuple[str, str]


def _assemble(out: Path, job: Job, items: Sequence[tuple[Utterance, Path]]) -> dict[str, Any]:
    """Write the archives from the parts, then the tables, and the summary last."""
    counts = {split: np.zeros(job.classes, dtype=np.int64) for split in SPLITS}
    moments: _Moments = 0, np.zeros(()), np.zeros(())
    dim = 0
    rows: dict[str, list[_Row]] = {split: [] for split in SPLITS}
    skipped = []
    with ExitStack() as stack:
        files = {
            split: [stack.enter_context(replacing(out / split / f"{n}.ark")) for n in OBJECTS]
            for split in SPLITS
        }
        for u, path in items:
            part = read_part(path, u.key) or Prepared(reason=CRASHED)
            reason, features, labels = part.reason, part.features, part.labels
            if reason:
                skipped.append(f"{_one_line(u.key)}\t{_one_line(reason)}\n")
                continue
            dim = dim or features.shape[1]
            if features.shape[1] != dim:
                raise UserError(f"{u.key} has {features.shape[1]} features a frame, not {dim}")
            feats, ali = files[u.split]
            offsets = write_matrix(feats, u.key, features), write_vector(ali, u.key, labels)
            hashes = digest(features), digest(labels)
            rows[u.split].append(_Row(u, len(features), offsets, hashes))
            counts[u.split] += np.bincount(labels, minlength=job.classes)
            if u.split == "train":
                moments = _merge(moments, features.astype(np.float64))
        write_whole(out / SKIPPED, "".join(skipped).encode())
        for split in SPLITS:
            if not rows[split]:
                raise UserError(
                    f"no utterance of the {split} set could be prepared:"
                    f" {out / SKIPPED} has the reason for each of {len(skipped):,}"
                )
    frames, mean, squares = moments
    statistics = {
        "frames": frames,
        "mean": mean.tolist(),
        "variance": (squares / frames).tolist(),
        "label_counts": counts["train"].tolist(),
    }
    write_json(out / STATISTICS, statistics)
    summary: dict[str, Any] = {
        "format": FORMAT,
        "classes": job.classes,
        "dim": dim,
        "targets": job.settings["targets"],
        "frame_shift": FRAME_SHIFT,
        "skipped": {"utterances": len(skipped), "share": len(skipped) / len(items)},
        "settings": job.settings,
        "source": job.source,
        CHECKSUMS: {split: _write_tables(out / split, rows[split]) for split in SPLITS},
    }
    for split in SPLITS:
        frames = sum(row.frames for row in rows[split])
        summary[split] = {
            "utterances": len(rows[split]),
            "frames": frames,
            "hours": frames * FRAME_SHIFT / 3600,
            "speakers": len({row.utterance.speaker for row in rows[split]}),
            "classes_seen": int((counts[split] > 0).sum()),
        }
    write_json(out / SUMMARY, summary)
    return summary


_Moments = tuple[int, NDArray[np.float64], NDArray[np.float64]]
"""Count, mean and sum of squared deviations of frames."""


def _merge(moments: _Moments, values: NDArray[np.float64]) -> _Moments:
    """Return moments with the frames of an utterance (Chan's method)."""
    frames, mean, squares = moments
    local, count = values.mean(axis=0), len(values)
    shift, total = local - mean, frames + count
    between = shift**2 * frames * count / total
    return total, mean + shift * count / total, squares + ((values - local) ** 2).sum(0) + between


def _write_tables(folder: Path, rows: Sequence[_Row]) -> str:
    """Write the tables of a split; return the hash of its checksums."""
    absolute = resolved(folder)
    tables: dict[str, Callable[[_Row], Any]] = {
        "feats.scp": lambda row: f"{absolute}/feats.ark:{row.offsets[0]}",
        "labels.scp": lambda row: f"{absolute}/labels.ark:{row.offsets[1]}",
        "utt2spk": lambda row: row.utterance.speaker,
        "text": lambda row: row.utterance.text,
        "utt2num_frames": lambda row: row.frames,
    }
    for name, value in tables.items():
        lines = (f"{row.utterance.key} {value(row)}".rstrip() + "\n" for row in rows)
        write_whole(folder / name, "".join(lines).encode())
    return write_checksums(folder, {row.utterance.key: row.hashes for row in rows})


def _one_line(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
