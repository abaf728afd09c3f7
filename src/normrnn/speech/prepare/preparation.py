"""From utterances to a prepared directory: several processes, resumable, same bytes every time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from normrnn.errors import UsageError, UserError
from normrnn.files import resolved
from normrnn.locks import exclusive
from normrnn.runs.names import LOCK
from normrnn.speech.archive import CHECKSUMS, Unusable
from normrnn.speech.prepare.features import FRAME_SHIFT
from normrnn.speech.prepare.job import Job, Prepared, Utterance, Work
from normrnn.speech.prepare.journal import CRASHED, JOURNAL, Journal, Record, Totals
from normrnn.speech.prepare.pool import in_order
from normrnn.speech.prepared import (
    FORMAT,
    SKIPPED,
    SPLITS,
    STATISTICS,
    SUMMARY,
    read_json,
    read_summary,
    write_checksums,
    write_json,
    write_text,
)

SETTINGS = ".preparation.json"


Report = Callable[[int, int, int], None]
"""Called with utterances done, of how many, and how many of these were skipped."""


@dataclass(frozen=True)
class Costs:
    """What a preparation took, all starts together, in seconds of one core."""

    sound: float
    features: float
    alignment: float


def finished(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The summary if `out` is finished, None if there is work to do; an error if not ours to touch.

    A directory that was begun or finished with other settings is refused, and any other that is
    not empty. One with utterances that crashed a process keeps its journal, and tries them again.
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
    return None if (out / JOURNAL).is_file() else summary


def prepare(job: Job, out: Path, processes: int, report: Report) -> tuple[dict[str, Any], Costs]:
    """Do what is left of the job; returns the summary."""
    out.mkdir(parents=True, exist_ok=True)
    # The lock is a file of its own, which is never replaced or removed.
    with exclusive(out / LOCK, UserError(f"another process is preparing {out}")):
        if (done := finished(out, job.settings)) is not None:  # by another process, just now
            return done, Costs(0.0, 0.0, 0.0)
        write_json(out / SETTINGS, job.settings)
        (out / SUMMARY).unlink(missing_ok=True)
        for split in SPLITS:
            (out / split).mkdir(exist_ok=True)
        with Journal(out, job.utterances, job.classes) as journal:
            todo = job.utterances[len(journal.records) :]
            report(len(journal.records), len(job.utterances), journal.skipped)
            work = _Checked(job.work, job.classes)
            for utterance, result in zip(todo, in_order(work, todo, processes, None), strict=True):
                journal.add(utterance, result)
                report(len(journal.records), len(job.utterances), journal.skipped)
        summary = _finish(out, job, journal.records, journal.totals)
        if not any(CRASHED in record for record in journal.records):
            (out / JOURNAL).unlink()
        (out / SETTINGS).unlink()
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


def _finish(out: Path, job: Job, records: Sequence[Record], totals: Totals) -> dict[str, Any]:
    """Everything but the archives; the summary last."""
    pairs = list(zip(job.utterances, records, strict=True))
    skipped = [(u, r["reason"]) for u, r in pairs if "reason" in r]
    lines = (f"{_one_line(u.key)}\t{_one_line(reason)}\n" for u, reason in skipped)
    write_text(out / SKIPPED, "".join(lines))
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


def _one_line(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]


def _abbreviated(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"
