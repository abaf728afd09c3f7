"""Utterances in LibriSpeech's layout: SUBSET/SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt."""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from normrnn.errors import UserError
from normrnn.extras import versions
from normrnn.files import ROWS, read_regular, read_text
from normrnn.speech.prepare.alignment import Lexicon, Targets, acoustic_model, align, read_lexicon
from normrnn.speech.prepare.audio import read_sound
from normrnn.speech.prepare.features import add_deltas, fbank
from normrnn.speech.prepare.job import Job, Prepared, Utterance, sample
from normrnn.speech.prepare.speakers import choose_dev, dev_settings

SOUNDS, WORDS = (".flac", ".wav"), "*.trans.txt"


class SourceUtterance(NamedTuple):
    """One utterance on disk; `path` is None without a sound file, `text` without a transcript."""

    key: str
    speaker: str
    text: str | None
    path: Path | None


def librispeech_job(
    directory: Path,
    targets: Targets,
    lexicon: Path | None,
    dev_speakers: Path | None,
    dev_fraction: float,
) -> Job:
    """Return the preparation of a directory, with labels from forced alignment."""
    made_with = versions("kaldi_native_fbank", "soundfile", "pocketsphinx")
    words = read_lexicon(lexicon) if lexicon else {}
    found = find_utterances(directory)
    speakers = {item.speaker for item in found if item.speaker.isprintable()}
    dev = choose_dev(speakers, dev_speakers, dev_fraction)
    utterances = [
        Utterance(
            item.key,
            item.speaker,
            "dev" if item.speaker in dev else "train",
            item.text or "",
            item.path,
            _problem(item),
        )
        for item in found
    ]
    settings = {
        "kind": "librispeech",
        "targets": targets,
        "data": _fingerprint(found),
        "lexicon": hashlib.sha256(read_regular(lexicon, ROWS)).hexdigest() if lexicon else None,
        **dev_settings(dev, dev_speakers, dev_fraction),
        **made_with,
    }
    source = {"directory": str(directory), "lexicon": str(lexicon) if lexicon else None}
    work = AlignWords(targets, words)
    return Job(settings, source, utterances, work, acoustic_model().classes(targets))


@dataclass(frozen=True)
class AlignWords:
    """Compute features and labels of an utterance from its sound and words."""

    targets: Targets
    lexicon: Lexicon

    def __call__(self, utterance: Utterance) -> Prepared:
        sound = read_sound(utterance.source)
        features = add_deltas(fbank(sound.samples, sound.rate))
        labels = align(sound.samples, utterance.text, self.targets, self.lexicon, len(features))
        return Prepared(features, labels, sound.channels)


def find_utterances(directory: Path) -> list[SourceUtterance]:
    """Return all utterances by key; `directory` has LibriSpeech/, is it, or is a subset of it."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
    root = directory / "LibriSpeech" if (directory / "LibriSpeech").is_dir() else directory
    level = next((one for one in ("*/*", "*/*/*") if any(_visible(root, f"{one}/{WORDS}"))), None)
    if level is None:
        raise UserError(
            f"{directory} is not in LibriSpeech's layout: no SPEAKER/CHAPTER/*.trans.txt in it, in"
            " a subset of it or in its LibriSpeech/"
        )
    found: dict[str, SourceUtterance] = {}
    for folder in (path for path in _visible(root, level) if path.is_dir()):
        for item in _chapter(folder):
            if item.key in found:
                raise UserError(f"utterance {item.key} is twice in {directory}: {folder}")
            found[item.key] = item
    return [found[key] for key in sorted(found)]


def _visible(root: Path, pattern: str) -> list[Path]:
    """Return matching paths whose names do not begin with a dot."""
    return sorted(path for path in root.glob(pattern) if not path.name.startswith("."))


def _chapter(folder: Path) -> Iterable[SourceUtterance]:
    speaker = folder.parent.name
    sounds = {p.stem: p for p in _visible(folder, "*") if p.suffix.lower() in SOUNDS}
    for transcript in _visible(folder, WORDS):
        for line in read_text(transcript).split("\n"):
            if not line.strip():
                continue
            key, *words = line.split()
            yield SourceUtterance(key, speaker, " ".join(words), sounds.pop(key, None))
    for key, path in sounds.items():
        yield SourceUtterance(key, speaker, None, path)


def _problem(item: SourceUtterance) -> str:
    if not (item.key.isprintable() and item.speaker.isprintable()):
        # A line break would add a line to utt2spk.
        return "its name or its speaker's has control characters, or is not UTF-8"
    if item.path is None:
        return f"it has no sound file ({' or '.join(SOUNDS)})"
    return "it has no transcript" if item.text is None else ""


def _fingerprint(found: Collection[SourceUtterance]) -> str:
    """Return a hash of keys, words, and samples of the sound files."""
    digest = hashlib.sha256()
    for item in found:
        digest.update(repr((item.key, item.speaker, item.text)).encode())
        digest.update(sample(item.path, None) if item.path else b"")
    return digest.hexdigest()
