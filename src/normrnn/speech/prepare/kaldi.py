"""Kaldi's data and alignment directories as utterances to prepare."""

import hashlib
import io
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from normrnn.errors import UserError
from normrnn.extras import versions
from normrnn.speech.archive import Entry, Unusable, is_command, locate, read_matrix, read_table
from normrnn.speech.prepare.audio import Sound, check_not_silent, read_sound
from normrnn.speech.prepare.features import add_deltas, fbank
from normrnn.speech.prepare.job import Job, Prepared, Utterance, sample
from normrnn.speech.prepare.pdfs import Labels, class_count, read_alignments
from normrnn.speech.prepare.speakers import choose_dev, dev_settings

OVERSHOOT = 0.5  # seconds by which a segment may exceed its recording, as in extract-segments


@dataclass(frozen=True)
class Side:
    """A data directory with its alignments."""

    data: Path
    ali: Path


@dataclass(frozen=True)
class Source:
    """Place of the features or the sound of an utterance, and its labels."""

    target: str
    folder: Path
    labels: NDArray[np.int32]
    segment: tuple[float, float] | None = None


def kaldi_job(
    train: Side,
    dev: Side | None,
    *,
    deltas: bool,
    allow_pipes: bool,
    classes: int | None,
    sample_rate: int,
    dev_speakers: Path | None,
    dev_fraction: float,
) -> Job:
    """Return the preparation of directories; without `dev`, speakers of `train` are split."""
    labels = {side: read_alignments(side.ali, classes) for side in (train, dev) if side is not None}
    count, counted = class_count(classes, {s.ali: found for s, found in labels.items()})
    utterances = {u.key: u for u in _utterances(train, labels[train], "train", allow_pipes)}
    settings = {
        "kind": "kaldi",
        "targets": "pdf",
        "classes": count,
        "classes_from": counted,
        "features": "computed" if _computed(train.data) else "given",
        "deltas": deltas or _computed(train.data),
    }
    if dev is not None:
        for utterance in _utterances(dev, labels[dev], "dev", allow_pipes):
            other = utterances.get(utterance.key)
            if other and other.source and utterance.source:
                raise UserError(f"{utterance.key} is in both {train.data} and {dev.data}")
            # Both sides may share one alignment directory.
            if not other or utterance.source:
                utterances[utterance.key] = utterance
    else:
        # Speakers without usable utterances are not chosen, unless they are listed.
        speakers = {u.speaker for u in utterances.values() if dev_speakers or not u.problem}
        problems = [f"{u.key}: {u.problem}" for u in utterances.values() if u.problem]
        chosen = choose_dev(speakers - {""}, dev_speakers, dev_fraction, problems)
        for key, u in utterances.items():
            if u.speaker in chosen:
                utterances[key] = Utterance(u.key, u.speaker, "dev", u.text, u.source, u.problem)
        settings |= dev_settings(chosen, dev_speakers, dev_fraction)
    if any(_computed(side.data) for side in labels):
        settings |= {"sample_rate": sample_rate, **versions("kaldi_native_fbank", "soundfile")}
    ordered = [utterances[key] for key in sorted(utterances)]
    settings["data"] = _fingerprint(ordered)
    source = {"data": str(train.data), "ali": str(train.ali)}
    if dev is not None:
        source |= {"dev_data": str(dev.data), "dev_ali": str(dev.ali)}
    return Job(settings, source, ordered, ReadKaldi(deltas, sample_rate), count)


@dataclass(frozen=True)
class ReadKaldi:
    """Read features, or compute them from sound."""

    deltas: bool
    rate: int

    def __call__(self, utterance: Utterance) -> Prepared:
        source: Source = utterance.source
        if not _computed(source.folder):
            features = _given(source, utterance.key)
            if self.deltas:
                features = add_deltas(features)
            return Prepared(features, source.labels)
        sound = _recording(source.target, source.folder, self.rate)
        samples = _cut(sound, source.segment)
        features = add_deltas(fbank(samples, self.rate))
        return Prepared(features, source.labels, sound.channels)


def _computed(data: Path) -> bool:
    return not (data / "feats.scp").is_file()


def _utterances(side: Side, labels: Labels, split: str, allow_pipes: bool) -> list[Utterance]:
    """Return the utterances of all keys of the data and of the alignments."""
    sources = _sources(side.data, labels, allow_pipes)
    speakers = _optional(side.data / "utt2spk")
    texts = _optional(side.data / "text") or {}
    found = []
    for key in sorted(sources.keys() | labels.keys()):
        source, problem = sources.get(key), ""
        speaker = key if speakers is None else speakers.get(key, "")
        if source is None:
            problem = f"it has an alignment, but is not in {side.data}"
        elif key not in labels:
            problem = f"it has no alignment in {side.ali}"
        elif not speaker:
            problem = f"it is not in {side.data / 'utt2spk'}"
        found.append(Utterance(key, speaker, split, texts.get(key, ""), source, problem))
    return found


def _sources(data: Path, labels: Labels, allow_pipes: bool) -> dict[str, Source]:
    """Return the source of every key; labels are empty for keys without any."""
    none = np.zeros(0, dtype=np.int32)
    if not _computed(data):
        table = _targets(data / "feats.scp", allow_pipes)
        return {key: Source(rx, data, labels.get(key, none)) for key, rx in table.items()}
    if not (data / "wav.scp").is_file():
        raise UserError(
            f"{data} is not a Kaldi data directory: it has neither feats.scp nor wav.scp"
        )
    table = _targets(data / "wav.scp", allow_pipes)
    segments = _optional(data / "segments")
    if segments is None:
        return {key: Source(rx, data, labels.get(key, none)) for key, rx in table.items()}
    sources = {}
    for key, line in segments.items():
        recording, start, end = _segment(line, key, data / "segments")
        if recording not in table:
            raise UserError(f"{data / 'segments'}: {recording} of {key} is not in wav.scp")
        sources[key] = Source(table[recording], data, labels.get(key, none), (start, end))
    return sources


def _segment(line: str, key: str, path: Path) -> tuple[str, float, float]:
    words = line.split()
    try:
        return words[0], float(words[1]), float(words[2])
    except (IndexError, ValueError):
        raise UserError(f"{path}: {key} needs a recording, a start and an end") from None


def _targets(path: Path, allow_pipes: bool) -> dict[str, str]:
    """Read an scp file; UserError for commands unless they are allowed."""
    table = read_table(path)
    for key, target in table.items():
        if _pipe(target) and not allow_pipes:
            raise UserError(
                f"{path} runs commands (for {key}: {target}); --allow-pipes lets it run them"
            )
        if is_command(target) and not _pipe(target):
            raise UserError(f"{path} has a command whose output is not read ({key}: {target})")
    return table


def _pipe(target: str) -> bool:
    """Return whether the entry is a command whose output is read: the bar is last."""
    return target.endswith("|") and not target.startswith("|")


def _optional(path: Path) -> dict[str, str] | None:
    return read_table(path) if path.is_file() else None


def _given(source: Source, key: str) -> NDArray[np.float32]:
    if not _pipe(source.target):
        return read_matrix(locate(source.target, source.folder), key)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "matrix"
        path.write_bytes(_output(source.target))
        try:
            return read_matrix(Entry(path, None), key)
        except Unusable:
            raise Unusable(f"its command writes no matrix: {source.target}") from None


@lru_cache(maxsize=1)
def _recording(target: str, folder: Path, rate: int) -> Sound:
    """Read a recording; the last one is cached, because its segments follow each other."""
    if _pipe(target):
        return read_sound(io.BytesIO(_output(target)), rate)
    entry = locate(target, folder)
    if entry.offset is not None:
        raise Unusable(f"its sound is inside an archive ({target}): not read here")
    return read_sound(entry.path, rate)


def _output(command: str) -> bytes:
    """Return the output of a command of an scp file, which the user allowed."""
    done = subprocess.run(command.rstrip("| \t"), shell=True, capture_output=True, check=False)
    if done.returncode or not done.stdout:
        errors = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = errors[-1] if errors else f"exit code {done.returncode}, no output"
        raise Unusable(f"its command failed ({command}): {reason}")
    return done.stdout


def _cut(sound: Sound, segment: tuple[float, float] | None) -> NDArray[np.int16]:
    if segment is None:
        return sound.samples
    start, end = segment
    length = len(sound.samples) / sound.rate
    end = length if end == -1 else end
    if not 0 <= start < end or end > length + OVERSHOOT or start >= length:
        raise Unusable(f"its segment {start:g}-{end:g} s does not fit a sound of {length:.2f} s")
    samples = sound.samples[int(start * sound.rate) : int(end * sound.rate)]
    check_not_silent(samples)
    return samples


def _fingerprint(utterances: list[Utterance]) -> str:
    """Return a hash of keys, speakers, words, labels, and samples of features or sound."""
    digest = hashlib.sha256()
    for u in utterances:
        digest.update(repr((u.key, u.speaker, u.split, u.text, bool(u.problem))).encode())
        if u.source is None:
            continue
        digest.update(u.source.labels.tobytes())
        if _pipe(u.source.target):
            digest.update(u.source.target.encode())
            continue
        entry = locate(u.source.target, u.source.folder)
        digest.update(repr((entry.path.name, entry.offset, u.source.segment)).encode())
        digest.update(sample(entry.path, entry.offset))
    return digest.hexdigest()
