"""Utterances in LibriSpeech's layout: SUBSET/SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt."""

import hashlib
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from normrnn.errors import UserError
from normrnn.extras import versions
from normrnn.files import ROWS, read_regular, read_text
from normrnn.speech.prepare.alignment import Targets, acoustic_model, align, read_lexicon
from normrnn.speech.prepare.features import add_deltas, fbank, read_sound
from normrnn.speech.prepare.job import Job, Prepared, Utterance, fingerprint, split_speakers

WORDS = "*.trans.txt"
_lexicon = cache(read_lexicon)
"""Read once by every process."""


def librispeech_job(
    directory: Path,
    targets: Targets,
    lexicon: Path | None,
    dev_speakers: Path | None,
    dev_fraction: float,
) -> Job:
    """Return the preparation of a directory, with labels from forced alignment."""
    made_with = versions("kaldi_native_fbank", "soundfile", "pocketsphinx")
    if lexicon:
        read_lexicon(lexicon)  # refused before work begins
    utterances, dev = split_speakers(find_utterances(directory), dev_speakers, dev_fraction)
    settings = {
        "kind": "librispeech",
        "targets": targets,
        "data": fingerprint(utterances),
        "lexicon": hashlib.sha256(read_regular(lexicon, ROWS)).hexdigest() if lexicon else None,
        **dev,
        **made_with,
    }
    source = {"directory": str(directory), "lexicon": str(lexicon) if lexicon else None}
    work = partial(align_words, targets=targets, lexicon=lexicon)
    return Job(settings, source, utterances, work, acoustic_model().classes(targets))


def align_words(utterance: Utterance, targets: Targets, lexicon: Path | None = None) -> Prepared:
    """Compute features and labels of an utterance from its sound and words."""
    samples = read_sound(utterance.path)
    features = add_deltas(fbank(samples))
    words = _lexicon(lexicon) if lexicon else {}
    return features, align(samples, utterance.text, targets, words, len(features))


def find_utterances(directory: Path) -> list[Utterance]:
    """Return all utterances by key; `directory` has LibriSpeech/, is it, or is a subset of it."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory")
    chapters = {
        path.parent
        for level in ("*/*/", "*/*/*/", "*/*/*/*/")
        for path in _visible(directory, f"{level}{WORDS}")
    }
    if not chapters:
        raise UserError(
            f"{directory} is not in LibriSpeech's layout: no SPEAKER/CHAPTER/{WORDS} in it, in a"
            " subset of it or in its LibriSpeech/"
        )
    found: dict[str, Utterance] = {}
    for folder in sorted(chapters):
        for utterance in _chapter(folder):
            if utterance.key in found:
                raise UserError(f"utterance {utterance.key} is twice in {directory}: {folder}")
            found[utterance.key] = utterance
    return [found[key] for key in sorted(found)]


def _visible(root: Path, pattern: str) -> list[Path]:
    """Return matching paths whose names do not begin with a dot."""
    return [path for path in root.glob(pattern) if not path.name.startswith(".")]


def _chapter(folder: Path) -> Iterator[Utterance]:
    texts: dict[str, str] = {}
    for transcript in _visible(folder, WORDS):
        for line in read_text(transcript).split("\n"):
            if line.strip():
                key, *words = line.split()
                texts[key] = " ".join(words)
    sounds = {path.stem: path for path in _visible(folder, "*") if path.suffix.lower() == ".flac"}
    for key in texts.keys() | sounds.keys():
        problem = "" if key in texts else "it has no transcript"
        if key not in sounds:
            problem = "it has no sound file (.flac)"
        if not (key.isprintable() and folder.parent.name.isprintable()):
            # A line break would add a line to utt2spk.
            problem = "its name or its speaker's has control characters, or is not UTF-8"
        text, sound = texts.get(key, ""), sounds.get(key, Path())
        yield Utterance(key, folder.parent.name, text, sound, problem=problem)
