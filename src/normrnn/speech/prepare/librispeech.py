"""LibriSpeech's layout, SUBSET/SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt, and frame labels by
forced alignment with pocketsphinx's English model."""

import hashlib
import re
import struct
from collections.abc import Iterable, Mapping
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normrnn.errors import UserError
from normrnn.extras import import_extra
from normrnn.files import ROWS, read_regular, read_text
from normrnn.speech.archive import Unusable
from normrnn.speech.prepare.features import SAMPLE_RATE, add_deltas, fbank, read_sound
from normrnn.speech.prepare.job import Job, Prepared, Utterance, fingerprint, split_speakers

WORDS = "*.trans.txt"
Targets = Literal["senone", "phone"]
Lexicon = Mapping[str, tuple[str, ...]]  # word -> pronunciations, each phones with spaces between

_VARIANT = re.compile(r"\(\d+\)$")
_FILLERS = frozenset({"<s>", "</s>", "<sil>", "[NOISE]", "[SPEECH]"})


def librispeech_job(
    directory: Path,
    targets: Targets,
    lexicon: Path | None,
    dev_speakers: Path | None,
    dev_fraction: float,
) -> Job:
    """Return the preparation of a directory, with labels from forced alignment."""
    packages = ("kaldi_native_fbank", "soundfile", "pocketsphinx")
    for name in packages:
        import_extra(name, "speech")
    if lexicon:
        read_lexicon(lexicon)  # refused before work begins
    utterances = split_speakers(find_utterances(directory), dev_speakers, dev_fraction)
    settings = {
        "kind": "librispeech",
        "targets": targets,
        "data": fingerprint(utterances),
        "lexicon": hashlib.sha256(read_regular(lexicon, ROWS)).hexdigest() if lexicon else None,
        **{name: metadata.version(name) for name in packages},
    }
    work = partial(align_words, targets=targets, lexicon=lexicon)
    return Job(settings, utterances, work, acoustic_model().classes(targets))


def align_words(utterance: Utterance, targets: Targets, lexicon: Path | None = None) -> Prepared:
    """Compute features and labels of an utterance from its sound and words."""
    samples = read_sound(utterance.path)
    features = add_deltas(fbank(samples))
    words = _cached_lexicon(lexicon) if lexicon else {}
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
        texts: dict[str, str] = {}
        for transcript in _visible(folder, WORDS):
            for line in filter(str.strip, read_text(transcript).split("\n")):
                key, *words = line.split()
                texts[key] = " ".join(words)
        sounds = {p.stem: p for p in _visible(folder, "*") if p.suffix.lower() == ".flac"}
        speaker = folder.parent.name
        for key in texts.keys() | sounds.keys():
            problem = "" if key in texts else "it has no transcript"
            if key not in sounds:
                problem = "it has no sound file (.flac)"
            if not (key.isprintable() and speaker.isprintable()):
                # A line break would add a line to utt2spk.
                problem = "its name or its speaker's has control characters, or is not UTF-8"
            if key in found:
                raise UserError(f"utterance {key} is twice in {directory}: {folder}")
            text, sound = texts.get(key, ""), sounds.get(key, Path())
            found[key] = Utterance(key, speaker, text, sound, problem=problem)
    return [found[key] for key in sorted(found)]


def _visible(root: Path, pattern: str) -> list[Path]:
    """Return matching paths whose names do not begin with a dot."""
    return [path for path in root.glob(pattern) if not path.name.startswith(".")]


class Model(NamedTuple):
    """Phones and states of the acoustic model."""

    phones: tuple[str, ...]
    states: int  # per phone
    senones: int

    def classes(self, targets: Targets) -> int:
        """Return the number of states of the model."""
        return self.senones if targets == "senone" else len(self.phones) * self.states


@cache
def acoustic_model() -> Model:
    """Read phones and numbers of states from the model's definition file."""
    pocketsphinx = import_extra("pocketsphinx", "speech")
    path = Path(pocketsphinx.get_model_path("en-us/en-us")) / "mdef"
    raw = path.read_bytes()
    if raw[:4] != b"BMDF":
        raise UserError(f"{path} is not a binary model definition")
    _, comment = struct.unpack_from("<ii", raw, 4)
    numbers = struct.unpack_from("<10i", raw, 12 + comment)
    phones, _, states, _, senones = numbers[:5]
    names = raw[12 + comment + 40 :].split(b"\0", phones)[:phones]
    return Model(tuple(name.decode() for name in names), states, senones)


def read_lexicon(path: Path) -> dict[str, tuple[str, ...]]:
    """Read lines `word PHONE PHONE ...`; a word may have several."""
    known = set(acoustic_model().phones)
    lexicon: dict[str, tuple[str, ...]] = {}
    for n, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        word, *phones = line.split()
        if not phones or not known.issuperset(phones):
            raise UserError(f"{path} line {n}: {word!r} needs phones of {' '.join(sorted(known))}")
        word = _VARIANT.sub("", word.lower())
        lexicon[word] = (*lexicon.get(word, ()), " ".join(phones))
    return lexicon


_cached_lexicon = cache(read_lexicon)  # read once by every process


def align(
    samples: NDArray[np.int16], text: str, targets: Targets, lexicon: Lexicon, frames: int
) -> NDArray[np.int32]:
    """Return a label for each of the `frames` frames of a sound at 16 kHz with these words.

    Every call makes a new decoder, so that labels do not depend on earlier utterances.
    """
    words = text.lower().split()
    if not words or "\0" in text:  # C code would loop on a zero byte
        raise Unusable("its transcript is empty, or has a zero byte")
    pocketsphinx = import_extra("pocketsphinx", "speech")
    # bestpath would search a lattice instead of following the given words.
    decoder = pocketsphinx.Decoder(lm=None, samprate=SAMPLE_RATE, bestpath=False, loglevel="FATAL")
    _add_words(decoder, words, lexicon)
    sound = samples.tobytes()
    try:
        decoder.set_align_text(" ".join(words))
        for finish in (decoder.set_alignment, decoder.get_alignment):  # words, then states
            decoder.start_utt()
            decoder.process_raw(sound, full_utt=True)
            decoder.end_utt()
            alignment = finish()
    except RuntimeError:
        alignment = None
    if alignment is None:
        raise Unusable("its words cannot be aligned with its sound")
    found = [_VARIANT.sub("", word.name) for word in alignment if word.name not in _FILLERS]
    if found != words:
        raise Unusable(f"its words cannot be aligned with its sound: {len(found)} of {len(words)}")
    labels = np.array(_labels(alignment, targets), dtype=np.int32)
    if len(labels) - frames not in (0, 1):
        raise Unusable(f"its alignment has {len(labels)} frames, its features have {frames}")
    return labels[:frames]


def _add_words(decoder: Any, words: Iterable[str], lexicon: Lexicon) -> None:
    missing = []
    for word in dict.fromkeys(words):
        known: dict[str, None] = {}
        name = word
        while (phones := decoder.lookup_word(name)) is not None:
            known[phones] = None
            name = f"{word}({len(known) + 1})"
        for phones in lexicon.get(word, ()):
            if phones not in known:
                name = f"{word}({len(known) + 1})" if known else word
                decoder.add_word(name, phones, False)
                known[phones] = None
        if not known:
            missing.append(word)
    if missing:
        raise Unusable(f"no pronunciation of {', '.join(missing)}: add it with --lexicon")


def _labels(alignment: Any, targets: Targets) -> list[int]:
    """Return a label per frame; Unusable for an alignment with gaps."""
    model = acoustic_model()
    phone_index = {name: index for index, name in enumerate(model.phones)}
    labels: list[int] = []
    for phone in (phone for word in alignment for phone in word):
        for position, state in enumerate(phone):
            if state.start != len(labels):
                raise Unusable(f"its alignment has a gap at frame {len(labels)}")
            label = phone_index[phone.name] * model.states + position
            labels += [int(state.name) if targets == "senone" else label] * state.duration
    return labels
