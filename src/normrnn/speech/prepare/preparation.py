"""From utterances to a prepared directory: resumable, same bytes every time.

Utterances are appended to the archives in the order of their keys, then to the index. The next
start takes over what the indices list up to the first damage, and cuts off the rest.
"""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normrnn import files
from normrnn.config.jsonio import differences
from normrnn.errors import UsageError, UserError
from normrnn.runs.records import LOCK
from normrnn.speech import corpus
from normrnn.speech.archive import write_matrix, write_vector
from normrnn.speech.corpus import Entry
from normrnn.speech.prepare.features import FRAME_SHIFT
from normrnn.speech.prepare.job import CRASHED, Job, Utterance, in_order, prepare_one
from normrnn.terminal import one_line

SETTINGS = "settings.json"
SKIPPED = "skipped.tsv"
_SECONDS = 5.0  # between lines of progress


def finished(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the summary if `out` is finished, None if there is work to do.

    UsageError for a directory that was begun or finished with other settings, or that has other
    files. Utterances that crashed a process are work to do.
    """
    if not out.exists() or (out.is_dir() and all(path.name == LOCK for path in out.iterdir())):
        return None
    if not (out / SETTINGS).is_file():
        raise UsageError(f"{out} is not empty and holds no preparation: choose another --out")
    before = files.read_sealed_json(out / SETTINGS)
    if changed := ", ".join(differences(before, settings).values()):
        raise UsageError(f"{out} was prepared with other settings: {changed}; choose another --out")
    summary = corpus.read_summary(out) if (out / corpus.SUMMARY).is_file() else None
    return None if summary and summary["crashed"] else summary


def prepare(job: Job, out: Path, processes: int) -> dict[str, Any]:
    """Do what is left of the job, with progress on standard error; return the summary."""
    out.mkdir(parents=True, exist_ok=True)
    # The lock is a file of its own, which is never replaced or removed.
    busy = UserError(f"another process is preparing {out}")
    with files.exclusive(out / LOCK, busy), ExitStack() as stack:
        if (summary := finished(out, job.settings)) is not None:  # by another process, just now
            return summary
        files.write_whole(out / SETTINGS, files.sealed_json(job.settings))
        crashed = corpus.read_summary(out)["crashed"] if (out / corpus.SUMMARY).is_file() else ""
        (out / corpus.SUMMARY).unlink(missing_ok=True)
        splits = {name: _Split(out / name, job.classes, stack, crashed) for name in corpus.SPLITS}
        done = {entry.key for split in splits.values() for entry in split.entries}
        todo = [u for u in job.utterances if u.key not in done]
        skipped: dict[str, str] = {}
        shown = -_SECONDS
        results = in_order(partial(prepare_one, job.work), todo, processes)
        for number, (u, result) in enumerate(zip(todo, results, strict=True), len(done)):
            if time.monotonic() > shown + _SECONDS:
                shown = time.monotonic()
                count = f"{number:,} of {len(job.utterances):,} utterances"
                print(f"{count}, {len(skipped):,} skipped", file=sys.stderr)
            if isinstance(result, str):
                skipped[u.key] = result
            else:
                splits[u.split].append(u, *result)
        return _finish(out, job, splits, skipped)


class _Split:
    """A split that is being written, and sums over its frames."""

    def __init__(self, folder: Path, classes: int, stack: ExitStack, last: str = "") -> None:
        """Take over what an earlier start has written, up to the first damage, or to a key."""
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.files = [
            stack.enter_context(open(folder / name, "ab", opener=files.following_no_link))  # noqa: SIM115
            for name in (*corpus.ARCHIVES, corpus.INDEX)
        ]
        self.entries: list[Entry] = []
        self.counts = np.zeros(classes, dtype=np.int64)
        self.frames, self.mean, self.squares = 0, np.zeros(()), np.zeros(())
        ends = (0, 0, 0)
        for line in files.read_regular(folder / corpus.INDEX, files.ROWS).split(b"\n")[:-1]:
            try:
                entry = Entry.decode(line)
                if last and entry.key > last:
                    break
                split = corpus.SpeechSplit(folder, [entry])
                self._count(entry, split.features(0).numpy(), split.labels(0).numpy())
            except (UserError, ValueError, TypeError):
                break
            ends = (*entry.ends, ends[2] + len(line) + 1)
        for file, end in zip(self.files, ends, strict=True):
            file.truncate(end)
            file.seek(end)

    def append(self, u: Utterance, features: NDArray[Any], labels: NDArray[Any]) -> None:
        """Write an utterance; it is there once the index lists it."""
        feats, ali, index = self.files
        starts = write_matrix(feats, u.key, features), write_vector(ali, u.key, labels)
        ends, hashes = (feats.tell(), ali.tell()), (corpus.digest(features), corpus.digest(labels))
        entry = Entry(u.key, u.speaker, len(features), starts, ends, hashes)
        self._count(entry, features, labels)
        index.write(entry.encode() + b"\n")
        for file in self.files:
            file.flush()

    def _count(self, entry: Entry, features: NDArray[Any], labels: NDArray[Any]) -> None:
        """Add an utterance to the sums: mean and squared deviations by Chan's method."""
        values = features.astype(np.float64)
        mean, count = values.mean(axis=0), len(values)
        if self.entries and mean.shape != self.mean.shape:
            sizes = f"{len(mean)} features a frame, not {len(self.mean)}"
            raise UserError(f"{entry.key} has {sizes} as those before it")
        self.counts += np.bincount(labels, minlength=len(self.counts))
        shift, total = mean - self.mean, self.frames + count
        between = shift**2 * self.frames * count / total
        self.squares = self.squares + ((values - mean) ** 2).sum(0) + between
        self.mean = self.mean + shift * count / total
        self.frames = total
        self.entries.append(entry)


def _finish(
    out: Path, job: Job, splits: dict[str, _Split], skipped: dict[str, str]
) -> dict[str, Any]:
    """Write the tables, and the summary last."""
    lines = [f"{one_line(key)}\t{one_line(reason)}" for key, reason in skipped.items()]
    _write_lines(out / SKIPPED, lines)
    count, train = len(job.utterances), splits["train"]
    crashed = [key for key, reason in skipped.items() if reason == CRASHED]
    summary: dict[str, Any] = {
        "format": corpus.FORMAT,
        "crashed": min(crashed, default=""),  # from this utterance on, the next start tries again
        "classes": job.classes,
        "dim": len(train.mean) if train.entries else 0,
        "skipped": {"utterances": len(skipped), "share": len(skipped) / count},
    }
    texts = {u.key: u.text for u in job.utterances}
    for name, split in splits.items():
        if not split.entries:
            raise UserError(
                f"no utterance of the {name} set could be prepared:"
                f" {out / SKIPPED} has the reason for each of {len(skipped):,}"
            )
        if split.mean.shape != train.mean.shape:
            sizes = f"{len(split.mean)} features a frame, not {len(train.mean)}"
            raise UserError(f"the {name} set has {sizes} as the train set")
        for file in split.files:
            os.fsync(file.fileno())
        place = files.resolved(split.folder)
        index = files.read_regular(place / corpus.INDEX, files.ROWS)
        tables: dict[str, Callable[[Entry], str]] = {
            "feats.scp": lambda entry, place=place: f"{place}/feats.ark:{entry.starts[0]}",
            "labels.scp": lambda entry, place=place: f"{place}/labels.ark:{entry.starts[1]}",
            "utt2spk": lambda entry: entry.speaker,
            "text": lambda entry: texts[entry.key],
        }
        for table, value in tables.items():
            _write_lines(split.folder / table, (f"{e.key} {value(e)}" for e in split.entries))
        summary[name] = {
            "utterances": len(split.entries),
            "frames": split.frames,
            "hours": split.frames * FRAME_SHIFT / 3600,
            "speakers": len({entry.speaker for entry in split.entries}),
            "classes_seen": int((split.counts > 0).sum()),
            "index": hashlib.sha256(index).hexdigest(),
        }
    summary["statistics"] = {
        "frames": train.frames,
        "mean": train.mean.tolist(),
        "variance": (train.squares / train.frames).tolist(),
        "label_counts": train.counts.tolist(),
    }
    files.write_whole(out / corpus.SUMMARY, files.sealed_json(summary))
    return summary


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    files.write_whole(path, "".join(f"{line.rstrip()}\n" for line in lines).encode())
